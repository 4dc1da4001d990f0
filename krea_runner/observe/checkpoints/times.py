"""How often checkpoints were written."""

from krea_runner.model import CheckpointSpec
from krea_runner.observe.checkpoints.newest import steps


def whole_since(spec: CheckpointSpec, *, most: int) -> list[float]:
    """When each of the newest whole checkpoints was finished, newest first, on the file server's clock; at most `most`.
    Empty without a directory, or when it cannot be read: then nothing is known."""
    if spec.directory is None:
        return []
    times: list[float] = []
    try:
        for _, name in steps(spec.pattern, [entry.name for entry in spec.directory.iterdir()]):
            path = spec.directory / name / spec.complete if spec.complete else spec.directory / name
            if len(times) < most and path.exists():
                times.append(path.stat().st_mtime)
    except OSError:
        return []
    return times
