"""Which checkpoints are whole. Names and one marker file are looked at, nothing is opened."""

import os
import re
import stat
from pathlib import Path

from krea_runner.model import Checkpoint, CheckpointReading, CheckpointSpec


def read_checkpoints(spec: CheckpointSpec) -> CheckpointReading:
    """The newest whole checkpoint and the unfinished ones that are newer. A directory that is not there yet holds none.

    Looks at marker files from the newest entry downwards and stops at the first whole one, so a long history of
    checkpoints costs one directory listing.
    """
    if spec.directory is None:
        return CheckpointReading()
    try:
        with os.scandir(spec.directory) as entries:
            found = steps(spec.pattern, [entry.name for entry in entries])
    except FileNotFoundError:
        return CheckpointReading()
    except OSError as error:
        return CheckpointReading(problems=(f"could not list checkpoints in {spec.directory}: {error.strerror}",))
    incomplete: list[str] = []
    for step, name in found:
        path = spec.directory / name
        try:
            whole = not spec.complete or _is_file(path / spec.complete)
        except OSError as error:
            return CheckpointReading(problems=(f"could not look at checkpoint {path}: {error.strerror}",))
        if whole:
            return CheckpointReading(newest=Checkpoint(step, path), incomplete=tuple(incomplete))
        incomplete.append(name)
    return CheckpointReading(incomplete=tuple(incomplete))


def whole_checkpoints(spec: CheckpointSpec, *, most: int) -> list[Checkpoint]:
    """The newest whole ones by the user's own rule, newest first. Empty where they cannot be seen."""
    if spec.directory is None:
        return []
    found: list[Checkpoint] = []
    try:
        with os.scandir(spec.directory) as entries:
            names = [entry.name for entry in entries]
        for step, name in steps(spec.pattern, names):
            path = spec.directory / name
            if len(found) < most and (not spec.complete or _is_file(path / spec.complete)):
                found.append(Checkpoint(step, path))
    except OSError:
        return []
    return found


def _is_file(path: Path) -> bool:
    """Path.is_file of Python 3.14 says False to what it could not see; this raises OSError."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def steps(pattern: str, names: list[str]) -> list[tuple[int, str]]:
    """Those that match, highest step first."""
    regex = step_regex(pattern)
    matches = ((regex.fullmatch(name), name) for name in names)
    return sorted(((int(match[1]), name) for match, name in matches if match), reverse=True)


def step_regex(pattern: str) -> "re.Pattern[str]":
    before, after = (re.escape(part) for part in pattern.split("{step}"))
    return re.compile(f"{before}([0-9]{{1,18}}){after}")
