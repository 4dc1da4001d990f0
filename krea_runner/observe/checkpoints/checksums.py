"""What each file of a checkpoint held when it was first seen whole, and whether it still does.

Kept in STATE_DIR/checksums, not in the checkpoint: its folder is the framework's, and may be read-only. A file with another
time than on record was written again, which is news and no damage; one with the same time and size and another content
was changed behind the file system's back.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from krea_runner.config.site import state_dir
from krea_runner.observe.checkpoints.tree import AT_ONCE, CheckpointError, Tree

PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Compared:
    """`recorded`: this was the first sight. `changed` and `gone` are damage; `rewritten` and `added` are news."""

    recorded: bool = False
    changed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def compare(tree: Tree, *, now: float) -> Compared:
    """Reads every byte. Of a checkpoint that is whole: what is on record is what it must go on to hold."""
    place = record_path(tree.root)
    old = _read(place)
    digests, unread = _digests(tree)
    known = {name: (file.size_bytes, file.mtime_ns) for name, file in tree.files.items()}
    if old is None:
        if not unread:
            _write(place, tree, digests, now)
        return Compared(recorded=not unread, unread=unread)
    changed: list[str] = []
    rewritten: list[str] = []
    for name, (size, mtime_ns, digest) in old.items():
        if name in digests and digests[name] != digest:
            (changed if known[name] == (size, mtime_ns) else rewritten).append(name)
    gone = tuple(name for name in old if name not in tree.files)
    if rewritten and not changed and not gone and not unread:
        _write(place, tree, digests, now)
    return Compared(False, tuple(changed), gone, tuple(rewritten), unread)


def record_path(root: Path) -> Path:
    real = os.fsencode(os.path.realpath(root))
    return state_dir() / "checksums" / f"{hashlib.sha256(real).hexdigest()[:24]}.json"


def _digests(tree: Tree) -> tuple[dict[str, str], tuple[str, ...]]:
    def one(name: str) -> tuple[str, str | None]:
        try:
            digest = hashlib.blake2b(digest_size=16)
            with tree.open(name) as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
            return name, digest.hexdigest()
        except CheckpointError as error:
            return f"{name or tree.root.name} {error}", None

    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        found = list(pool.map(one, tree.files))
    digests = {name: digest for name, digest in found if digest is not None}
    return digests, tuple(name for name, digest in found if digest is None)


def _write(place: Path, tree: Tree, digests: Mapping[str, str], now: float) -> None:
    files = {name: [file.size_bytes, file.mtime_ns, digests[name]] for name, file in tree.files.items()}
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    partial.write_text(json.dumps({"schema_version": 1, "root": str(tree.root), "at": now, "files": files}))
    partial.replace(place)


def _read(place: Path) -> dict[str, tuple[int, int, str]] | None:
    """None where there is nothing on record that can be read: then this is the first sight."""
    try:
        files = json.loads(place.read_text())["files"]
        return {name: (int(size), int(mtime_ns), str(digest)) for name, (size, mtime_ns, digest) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
