"""From which checkpoint the next start is to go on: the newest that is whole when it is looked into, not only by its marker."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from krea_runner.model import Checkpoint, CheckpointReading, RunConfig
from krea_runner.observe.checkpoints.newest import whole_checkpoints
from krea_runner.observe.resumed import left_mark, read_left
from krea_runner.rundir import RunDir

if TYPE_CHECKING:
    from krea_runner.observe.checkpoints.examine import Examined

# Checkpoints that are looked into, from the newest on.
MOST = 5


@dataclass(frozen=True, slots=True)
class Start:
    """`whole`: what the next start loads, then what it would step back to. `note` is for the reason of a decision."""

    whole: tuple[Checkpoint, ...] = ()
    note: str = ""

    @property
    def step(self) -> int | None:
        return self.whole[0].step if self.whole else None


def start_of(config: RunConfig, seen: CheckpointReading, *, now: float, dry_run: bool = False) -> Start:
    """Names those that say they are whole and are not in RUN_DIR/checkpoints.broken, which the batch script reads.

    Where none of the newest is what its format wants, the format is not what it looks like: the user's rule is trusted. So it is
    where files cannot be seen from here.
    """
    from krea_runner.observe.checkpoints.examine import State, examine  # a quiet tick does without

    spec, run_dir = config.checkpoint, RunDir(config.run_dir)
    if spec.directory is None or config.files != "mounted":
        return Start((seen.newest,) if seen.newest else ())
    left = read_left(run_dir)
    by_rule = [one for one in whole_checkpoints(spec, most=MOST + len(left)) if left_mark(spec, one.path) not in left][
        :MOST
    ]
    whole: list[Checkpoint] = []
    broken: list[Examined] = []
    for one in by_rule:
        told = examine(one.path, now=now, spec=spec, headers=True)
        if told.state in {State.BROKEN, State.IN_PROGRESS, State.UNFINISHED}:
            broken.append(told)
        else:
            whole.append(one)
            if len(whole) == 2 or not spec.step_back:
                break
    if not whole:
        return Start(tuple(by_rule))
    note = "; ".join(f"{one.name} is {one.state}, not loaded: {next(iter(one.whys), '?')}" for one in broken[:2])
    trouble = "" if dry_run else _write(run_dir, [left_mark(spec, one.path) for one in broken])
    return Start(tuple(whole), "; ".join(filter(None, [note, trouble])))


def _write(run_dir: RunDir, marks: list[str]) -> str:
    """Why it could not be written; empty when it is as it should be."""
    text, path = "".join(f"{mark}\n" for mark in marks if mark), run_dir.broken_checkpoints
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if (path.read_text(errors="replace") if path.is_file() else "") == text:
            return ""
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        return f"{path.name} could not be written ({error.strerror}): the batch script does not know"
    return ""
