"""What must not be pruned, and the deleting itself: renamed first, so that nobody ever resumes from half of one."""

import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from krea_runner.errors import KreaRunnerError
from krea_runner.history.store import History
from krea_runner.model import Run, RunState
from krea_runner.observe.checkpoints.contents import read_json
from krea_runner.observe.checkpoints.examine import DELETED, Examined, State, pointed_at
from krea_runner.observe.checkpoints.tree import CheckpointError, walk
from krea_runner.observe.resumed import left_mark, read_left, resumed_step
from krea_runner.rundir import RunDir

_VALUE = re.compile(r"([A-Za-z][\w/.]*)=(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")


def runs_with(history: History | None, directory: Path, *, user: str) -> list[Run]:
    """Those that may start again and have their checkpoints there."""
    states = [RunState.SUBMITTING, RunState.ACTIVE, RunState.HELD]
    runs = [] if history is None else history.list_runs(user=user, states=states)
    return [run for run in runs if (own := run.config.checkpoint.directory) is not None and _same(own, directory)]


def left_names(runs: Sequence[Run], found: Sequence[Examined]) -> set[str]:
    """Of those that some run has stepped back from, and that nobody has written again since."""
    left = [(run.config.checkpoint, read_left(RunDir(run.config.run_dir))) for run in runs]
    return {one.name for one in found for spec, marks in left if left_mark(spec, one.path) in marks}


def protected_steps(
    history: History | None, live: Sequence[Run], directory: Path, found: Sequence[Examined]
) -> set[int]:
    """What attempts of `live` runs have loaded: by their batch script's word, and, as that may be missing, what was the newest
    whole one when they started. And what a pointer file names."""
    pointer = pointed_at(directory)
    steps = {pointer[1]} if pointer is not None and pointer[1] is not None else set()
    return steps.union(*(_loaded(history, run, found) for run in live if history is not None))


def _loaded(history: History, run: Run, found: Sequence[Examined]) -> set[int]:
    steps = set()
    for attempt in history.attempts(run.run_id):
        if attempt.ended_at is not None:
            continue
        told = resumed_step(RunDir(run.config.run_dir), attempt.key)
        if told is not None:
            steps.add(told)
        since = attempt.started_at or attempt.first_seen_at
        before = [
            one.step for one in found
            if one.step is not None and one.state is State.WHOLE and one.written_to is not None and one.written_to <= since
        ]  # fmt: skip
        steps |= {max(before)} if before else set()
    return steps


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def metric_of(one: Examined, metric: str) -> float | None:
    """From the name, as Lightning and NeMo write it (`val_loss=0.12`), or the last of HF Trainer's log."""
    for name, value in _VALUE.findall(one.name):
        if name == metric:
            return float(value)
    if one.format != "hf-trainer":
        return None
    try:
        log = read_json(walk(one.path), "trainer_state.json").get("log_history")
    except (CheckpointError, KeyError):
        return None
    values = [entry.get(metric) for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return numbers[-1] if numbers else None


def delete(path: Path) -> None:
    """Raises: KreaRunnerError. What could not be deleted whole has another name by then, and the next prune goes on."""
    grave = path.with_name(f"{DELETED}{path.name}")
    try:
        path.rename(grave)
        _remove(grave)
    except OSError as error:
        raise KreaRunnerError(
            f"deleting checkpoint {path.name!r}: {error.strerror}", hint=f"look at {path.parent}"
        ) from error


def leftovers(directory: Path) -> list[Path]:
    """Of a prune that was killed."""
    try:
        return sorted(path for path in directory.iterdir() if path.name.startswith(DELETED))
    except OSError:
        return []


def sweep(directory: Path) -> int:
    """Raises: KreaRunnerError."""
    left = leftovers(directory)
    for path in left:
        try:
            _remove(path)
        except OSError as error:
            raise KreaRunnerError(f"deleting {path}: {error.strerror}") from error
    return len(left)


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()
