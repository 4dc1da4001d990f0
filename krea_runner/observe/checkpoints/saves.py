"""How a run's saving goes: names and times of all, sizes of the newest two, the room that is left."""

import os

from krea_runner.model import CheckpointReading, CheckpointSpec, Saves
from krea_runner.observe.checkpoints.newest import whole_checkpoints
from krea_runner.observe.checkpoints.tree import Tree, walk

MOST_TIMES = 9


def read_saves(spec: CheckpointSpec, seen: CheckpointReading, *, limit_at: float | None = None) -> Saves:
    """`seen`: the same look's reading. Walks at most three checkpoints."""
    if spec.directory is None:
        return Saves(limit_at=limit_at)
    if seen.problems:
        return Saves(limit_at=limit_at, unseen=seen.problems[0])
    times: list[float] = []
    trees: list[Tree] = []
    try:
        for one in whole_checkpoints(spec, most=MOST_TIMES):
            times.append((one.path / spec.complete if spec.complete else one.path).stat().st_mtime)
            if len(trees) < 2:
                trees.append(walk(one.path))
        room = os.statvfs(spec.directory)
    except FileNotFoundError:  # nothing was saved yet, or it is being deleted
        return Saves(limit_at=limit_at)
    except OSError as error:
        return Saves(limit_at=limit_at, unseen=f"could not look at {spec.directory}: {error.strerror}")
    trees = [tree for tree in trees if not (tree.unseen or tree.vanished or tree.truncated)]
    growing = seen.incomplete[0] if seen.incomplete else ""
    begun = walk(spec.directory / growing) if growing else None
    return Saves(
        written_at=tuple(times),
        sizes_bytes=tuple(tree.size_bytes for tree in trees),
        files=len(trees[0].files) if trees else 0,
        took_s=max(filter(None, map(_took_s, trees)), default=None),
        growing=growing,
        growing_bytes=begun.size_bytes if begun else 0,
        growing_at=begun.written[1] if begun and begun.written else None,
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail or None,  # file systems without a number say 0
        limit_at=limit_at,
    )


def _took_s(tree: Tree) -> float | None:
    """From the first file's end to the last one's: less than the save took, and not known for one file."""
    written = tree.written
    return written[1] - written[0] if written and len(tree.files) > 1 else None
