"""Pure parsers of what Slurm's commands print. A line that cannot be read is an error that keeps it, never a shorter list:
a lost line would look like a job that left the queue."""

from krea_runner.errors import SchedulerOutputError
from krea_runner.model import JobRecord, JobState

# squeue -O fields, each with the suffix that prints it whole, followed by a bar (`Field:|`; without it squeue cuts at 20
# columns). No free text among them: names and comments may hold bars and line breaks.
SQUEUE_FIELDS = (
    "JobID", "State", "RestartCnt", "Reason", "exit_code", "SubmitTime", "StartTime", "EndTime", "NodeList", "BatchHost",
    "Requeue",
)  # fmt: skip
SACCT_FIELDS = ("JobIDRaw", "State", "ExitCode", "Submit", "Start", "End", "NodeList")
_NOTHING = frozenset({"", "N/A", "n/a", "NONE", "None", "Unknown", "(null)", "None assigned"})


def parse_squeue(text: str, argv: tuple[str, ...] = ()) -> list[JobRecord]:
    """Records in the order printed, from `squeue -h -O SQUEUE_FORMAT` with epoch times.

    Raises: SchedulerOutputError.
    """
    return [_squeue_line(line, argv) for line in text.splitlines() if line.strip()]


def parse_tagged(text: str, argv: tuple[str, ...] = ()) -> list[tuple[JobRecord, str]]:
    """The same with `Comment` as the last field: the rest of the line, bars and all.

    A comment may hold line breaks: a line without the fields continues the one before it.
    """
    found: list[tuple[JobRecord, str]] = []
    for line in text.splitlines():
        if line.count("|") > len(SQUEUE_FIELDS) and line.split("|", 1)[0].replace("_", "").isalnum():
            fields = line.split("|", len(SQUEUE_FIELDS))
            found.append((_squeue_line("|".join(fields[:-1]) + "|", argv), fields[-1].removesuffix("|")))
        elif not found and line.strip():
            raise SchedulerOutputError(f"reading squeue: not a job: {line[:200]!r}", line=line, argv=argv)
    return found


def parse_sacct(text: str, argv: tuple[str, ...] = ()) -> dict[str, JobRecord]:
    """The last row of each job (its newest start), from `sacct -D -X -P -n` with SACCT_FIELDS and epoch times.

    The restart count is the number of rows before it: sacct 22.05 has no field for it. Its exit code is cut to seven
    bits (137 reads as 9:0).
    Raises: SchedulerOutputError.
    """
    records: dict[str, JobRecord] = {}
    starts: dict[str, int] = {}
    for line in filter(str.strip, text.splitlines()):
        fields = line.split("|")
        if len(fields) != len(SACCT_FIELDS):
            raise SchedulerOutputError(f"reading sacct: {len(fields)} fields in {line[:200]!r}", line=line, argv=argv)
        job_id, state, exit_code, submitted, started, ended, nodelist = fields
        try:
            code, number = (int(part) for part in exit_code.split(":"))
            records[job_id] = JobRecord(
                job_id=job_id,
                state=job_state(state),
                raw_state=state,
                restart_count=starts.get(job_id, 0),
                exit_code=code,
                signal=number,
                submitted_at=_epoch(submitted),
                started_at=_epoch(started),
                ended_at=_epoch(ended),
                nodelist="" if nodelist in _NOTHING else nodelist,
            )
        except ValueError:
            raise SchedulerOutputError(f"reading sacct: {line[:200]!r}", line=line, argv=argv) from None
        starts[job_id] = starts.get(job_id, 0) + 1
    return records


def parse_submitted(text: str, argv: tuple[str, ...] = ()) -> str:
    """The job id from `sbatch --parsable`: `123` or `123;cluster`. Site plugins may print lines of their own before it.

    Raises: SchedulerOutputError.
    """
    for line in reversed(text.splitlines()):
        job_id = line.strip().split(";")[0]
        if job_id.isdigit():
            return job_id
    raise SchedulerOutputError(f"sbatch named no job id: {text[:200]!r}", line=text, argv=argv)


def job_state(word: str) -> JobState:
    """The state of Slurm's word; `CANCELLED by 1001` (sacct) is CANCELLED, a word nobody knows is UNKNOWN."""
    try:
        return JobState(word.split()[0].removesuffix("+"))
    except (ValueError, IndexError):
        return JobState.UNKNOWN


def _squeue_line(line: str, argv: tuple[str, ...]) -> JobRecord:
    fields = line.split("|")[:-1]
    if len(fields) != len(SQUEUE_FIELDS):
        raise SchedulerOutputError(f"reading squeue: {len(fields)} fields in {line[:200]!r}", line=line, argv=argv)
    job_id, state, restarts, reason, status, submitted, started, ended, nodelist, batch, requeue = fields
    try:
        wait_status = int(status)  # as wait(2) gives it: 1792 is exit code 7, 9 is signal 9 (22.05.8)
        return JobRecord(
            job_id=job_id,
            state=job_state(state),
            raw_state=state,
            reason=reason,
            restart_count=int(restarts),
            exit_code=wait_status >> 8,
            signal=wait_status & 0x7F,
            submitted_at=_epoch(submitted),
            started_at=_epoch(started),
            ended_at=_epoch(ended),
            nodelist="" if nodelist in _NOTHING else nodelist,
            batch_node="" if batch in _NOTHING else batch,
            requeue_allowed={"1": True, "0": False}.get(requeue),
        )
    except ValueError:
        raise SchedulerOutputError(f"reading squeue: {line[:200]!r}", line=line, argv=argv) from None


def _epoch(text: str) -> float | None:
    return None if text in _NOTHING else float(int(text))
