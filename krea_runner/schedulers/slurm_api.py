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
import os
import sys
from collections.abc import Sequence
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


class SlurmApi:
    name = "slurm"
    whole_second_starts = True

    def __init__(self, companion: Companion, versions: str) -> None:
        self._companion: Companion | None = companion
        self._versions = versions
        self._cli = SlurmCli()

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
        return self._completed(asked, self._ask("jobs", doing="asking for jobs", ids=asked))

    def find_by_tag(self, tag: str) -> list[JobRecord]:
        rows = self._ask("tagged", doing="looking for your jobs", tag=tag, uid=os.getuid())
        if not all(row["job_id"] for row in rows):  # an array: squeue can tell its tasks apart
            return self._cli.find_by_tag(tag)
        found = self._completed([row["job_id"] for row in rows], rows)
        return sorted(found.values(), key=lambda job: job.submitted_at or 0.0, reverse=True)

    def submit(self, script: Path, *, tag: str) -> str:
        return self._cli.submit(script, tag=tag)

    def requeue(self, job_id: str) -> None:
        if job_id.isdecimal():
            self._ask("requeue", doing=f"requeueing job {job_id}", job=int(job_id))
        else:
            self._cli.requeue(job_id)

    def start_now(self, job_id: str) -> None:
        if job_id.isdecimal():
            self._ask("start_now", doing=f"lifting the start time of job {job_id}", job=int(job_id))
        else:
            self._cli.start_now(job_id)

    def cancel(self, job_id: str) -> None:
        self._cli.cancel(job_id)

    def checks(self) -> list[Check]:
        return [*self._cli.checks(), Check("interface", True, self._versions)]

    def close(self) -> None:
        if self._companion is not None:
            self._companion.close()
        self._companion = None

    def _completed(self, asked: Sequence[str], rows: list[dict[str, Any]]) -> dict[str, JobRecord]:
        found = {record.job_id: record for record in map(_record, rows) if not record.state.is_ended}
        rest = [job_id for job_id in asked if job_id not in found]
        try:
            found |= self._cli.jobs(rest)
        except SchedulerUnavailable as error:
            if not found:
                raise
            found |= {job_id: JobRecord(job_id, JobState.UNKNOWN, str(error)) for job_id in rest}
        return {job_id: found[job_id] for job_id in asked if job_id in found}

    def _ask(self, verb: str, *, doing: str, **more: Any) -> Any:
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

_opened: dict[str | None, Scheduler] = {}  # by SLURM_CONF, for as long as this process lives


def open_api() -> Scheduler:
    """Through pyslurm where it is of the cluster's version, otherwise through the commands, with the reason as a check.

    One companion serves all that this process asks. No answer from it proves nothing, so it is tried again the next time.
    """
    conf = os.environ.get("SLURM_CONF")
    known = _opened.get(conf)
    if known is not None and not (isinstance(known, SlurmApi) and not known.is_connected):
        return known
    _opened.pop(conf, None)
    try:
        companion, (ours, theirs) = _start()
    except SchedulerError as error:
        return by_commands(str(error), hint=error.hint or f"look: {Path(sys.executable).name} -c 'import pyslurm'")
    if _major(ours) == _major(theirs):
        _opened[conf] = SlurmApi(companion, f"pyslurm {ours}")
    else:
        companion.close()
        reason = f"pyslurm {ours} is for Slurm {_major(ours)}, the cluster runs {theirs}"
        _opened[conf] = by_commands(
            reason, hint=f"nothing is lost but milliseconds; or pip install 'pyslurm=={_major(theirs)}.*'"
        )
    return _opened[conf]


def by_commands(reason: str, *, hint: str = "") -> Scheduler:
    return SlurmCli(Check("interface", True, f"Slurm's commands: {reason}", hint))


def _major(version: str) -> str:
    """`25.11` of `25.11.7-1`: Slurm's major releases are named by year and month."""
    return ".".join(version.split(".")[:2])
