"""Slurm through pyslurm (the extra `[pyslurm]`), where its version is the cluster's; what it cannot do goes by command.

Read in pyslurm 25.11.2, and seen: what it gives of a job that waits or runs is what squeue prints, so that is taken. It is not
asked for:
- exit codes: it takes 128 off those above 127, so that `exit 137` reads as 9 and `exit 128` as success. A job that has
  ended, or that it does not know, is looked up as slurm_cli does, accounting included;
- submitting: its own reading of `#SBATCH` lines covers a part of sbatch's options and drops what it does not know;
- cancelling: it reads errno without looking at the call's result, so an old errno is taken for a refusal;
- tasks of an array and components of a heterogeneous job: its calls take the id of one job, a number.
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from krea_runner.errors import JobNotFound, SchedulerError, SchedulerOutputError, SchedulerUnavailable
from krea_runner.model import JobRecord, JobState
from krea_runner.proc import Companion, clean_environment
from krea_runner.schedulers import Check, Scheduler
from krea_runner.schedulers.slurm_cli import TIMEOUT_S, SlurmCli, checked_id
from krea_runner.schedulers.slurm_parse import job_state, printable, read_refusal

WORKER = Path(__file__).with_name("slurm_api_worker.py")

# slurm_errno.h, 25.11.7. Below 1000 stands what the system said (connection refused, no such socket).
_NO_ANSWER = (range(-1, 1100), range(1800, 1900), range(5000, 5100), range(6000, 6100))
_STANDBY = frozenset({2027, 2131})
_NO_SUCH_JOB = frozenset({2017})


class SlurmApi(SlurmCli):
    """Where a method is not here, it goes by command."""

    def __init__(self, companion: Companion, versions: str) -> None:
        super().__init__(Check("interface", True, versions))
        self._companion: Companion | None = companion

    @property
    def is_connected(self) -> bool:
        """False after a question that got no answer; the next question starts another companion."""
        return self._companion is not None

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        """One query of pyslurm, and one as slurm_cli does it when some of the jobs have ended or are not known. When that
        one gets no answer, they are UNKNOWN beside those that pyslurm does know."""
        if not job_ids:
            return {}
        asked = [checked_id(job_id) for job_id in job_ids]
        return self._completed(asked, self._query("jobs", doing="asking for jobs", ids=asked))

    def my_jobs(self, known: Sequence[str]) -> dict[str, JobRecord]:
        """One query of pyslurm while all of the user's jobs wait or run; else one as slurm_cli does it."""
        rows = self._query("mine", doing="asking for your jobs", uid=os.getuid())
        found = {row["job_id"]: _record(row) for row in rows if row["job_id"]}
        ended = any(record.state.is_ended for record in found.values())
        if ended or len(found) < len(rows) or any(checked_id(job_id) not in found for job_id in known):
            return super().my_jobs(known)
        return found

    def requeue(self, job_id: str) -> None:
        if job_id.isdecimal():
            self._query("requeue", doing=f"requeueing job {job_id}", job=int(job_id))
        else:
            super().requeue(job_id)

    def start_now(self, job_id: str, excluded: Sequence[str] | None = None) -> None:
        if job_id.isdecimal() and excluded is None:
            self._query("start_now", doing=f"lifting the start time of job {job_id}", job=int(job_id))
        else:
            super().start_now(job_id, excluded)

    def close(self) -> None:
        if self._companion is not None:
            self._companion.close()
        self._companion = None

    def _completed(self, asked: Sequence[str], rows: list[dict[str, Any]]) -> dict[str, JobRecord]:
        found = {record.job_id: record for record in map(_record, rows) if not record.state.is_ended}
        rest = [job_id for job_id in asked if job_id not in found]
        try:
            found |= super().jobs(rest)
        except SchedulerUnavailable as error:
            if not found:
                raise
            found |= {job_id: JobRecord(job_id, JobState.UNKNOWN, str(error)) for job_id in rest}
        return {job_id: found[job_id] for job_id in asked if job_id in found}

    def _query(self, verb: str, *, doing: str, **more: Any) -> Any:
        """A companion that gave no answer is not asked again: the next one reads slurm.conf anew."""
        try:
            if self._companion is None:
                self._companion, _ = _start()
            return _answer(self._companion, {"do": verb, **more}, doing=doing)
        except SchedulerUnavailable:
            self.close()
            raise


def _record(row: dict[str, Any]) -> JobRecord:
    """Without exit code and end: those of a job that has not ended mean nothing."""
    try:
        return JobRecord(
            job_id=row["job_id"],
            state=job_state(row["raw_state"]),
            raw_state=row["raw_state"],
            reason=row["reason"] or "",
            restart_count=row["restart_count"] or 0,
            submitted_at=_epoch(row["submitted_at"]),
            started_at=_epoch(row["started_at"]),
            nodelist=row["nodelist"] or "",
            batch_node=row["batch_node"] or "",
            requeue_allowed=row["requeue_allowed"],
            user=row["user"] or "",
            name=row["name"] or "",
            comment=row["comment"] or "",
        )
    except (AttributeError, TypeError, ValueError) as error:
        line = json.dumps(row)
        raise SchedulerOutputError(f"reading pyslurm: not a job: {printable(line, 200)}", line=line) from error


def _epoch(value: int | None) -> float | None:
    return None if value is None else float(value)


# ------------------------------------------------------------------------------------------------- the process beside us


def _start() -> tuple[Companion, tuple[str, str]]:
    """And the versions of pyslurm and of the cluster. Raises: SchedulerError."""
    # -P: no pyslurm.py of the folder we happen to stand in. The last: array descriptions are not cut at 64 characters.
    environment = clean_environment(os.environ) | {"LC_ALL": "C.UTF-8", "SLURM_BITSTR_LEN": "0"}
    try:
        companion = Companion([sys.executable, "-P", str(WORKER)], env=environment)
    except OSError as error:
        raise SchedulerUnavailable(f"cannot start {WORKER.name}: {error.strerror}") from error
    try:
        ours, theirs = _answer(companion, {}, doing="starting pyslurm")
    except SchedulerError:
        companion.close()
        raise
    return companion, (ours, theirs)


def _answer(companion: Companion, question: dict[str, Any], *, doing: str) -> Any:
    """Raises: what its errno means; SchedulerUnavailable when there was no answer in time, or the process ended."""
    try:
        line = companion.ask(json.dumps(question) if question else "", timeout_s=TIMEOUT_S)
    except TimeoutError as error:
        hint = "ask the controller: scontrol ping"
        raise SchedulerUnavailable(f"{doing}: pyslurm: no answer in {TIMEOUT_S:g} s", hint=hint) from error
    except EOFError as error:
        words = str(error).splitlines() or ["not a word"]
        raise SchedulerUnavailable(f"{doing}: pyslurm ended: {printable(words[-1])}", stderr=str(error)) from error
    said = json.loads(line)
    if "error" not in said:
        return said["answer"]
    raise _refusal(said["errno"])(
        f"{doing}: {printable(said['error'])} (pyslurm, errno {said['errno']})",
        stderr=said["error"],
        hint=read_refusal(said["error"])[1] or None,
    )


def _refusal(errno: int) -> type[SchedulerError]:
    if errno in _NO_SUCH_JOB:
        return JobNotFound
    if errno in _STANDBY or any(errno in numbers for numbers in _NO_ANSWER):
        return SchedulerUnavailable
    return SchedulerError


# ------------------------------------------------------------------------------------------------ pyslurm or the commands

# A cluster that pyslurm does not fit, or a controller that did not answer, is looked at again after this long.
LOOK_AGAIN_S = 600.0
_opened: dict[str | None, tuple[Scheduler, float]] = {}  # by SLURM_CONF; until when, on the monotonic clock


def open_api() -> Scheduler:
    """Through pyslurm where it is of the cluster's version, otherwise through the commands, with the reason as a check.

    One companion serves all that this process asks. After a question without an answer it is judged anew.
    """
    conf = os.environ.get("SLURM_CONF")
    known, until = _opened.get(conf, (None, 0.0))
    if isinstance(known, SlurmApi):
        until = math.inf if known.is_connected else 0.0
    if known is None or time.monotonic() > until:
        known = _open()
        _opened[conf] = known, time.monotonic() + LOOK_AGAIN_S
    return known


def _open() -> Scheduler:
    try:
        companion, (ours, theirs) = _start()
    except SchedulerError as error:
        # What a cluster of another version says is anything from "Zero Bytes were transmitted" (22.05.8) to a refusal.
        hint = f"pyslurm must be of the cluster's own version (sbatch --version); look: {sys.executable} -c 'import pyslurm'"
        return by_commands(f"pyslurm {version('pyslurm')} does not work here: {error}", hint=hint)
    if _major(ours) == _major(theirs):
        return SlurmApi(companion, f"pyslurm {ours}")
    companion.close()
    return by_commands(
        f"pyslurm {ours} is for Slurm {_major(ours)}, the cluster runs {theirs}",
        hint=f"nothing is lost but milliseconds; its own: pip install 'pyslurm=={_major(theirs)}.*'",
    )


def by_commands(reason: str, *, hint: str = "") -> Scheduler:
    return SlurmCli(Check("interface", True, f"Slurm's commands: {reason}", hint))


def _major(version: str) -> str:
    """`25.11` of `25.11.7-1`: Slurm's major releases are named by year and month."""
    return ".".join(version.split(".")[:2])
