"""What Slurm's commands print, read: text in, records out. What cannot be read is an error that keeps it, never a
shorter list: a lost row would look like a job that left the queue. Real output lies in tests/recordings/."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from krea_runner.errors import JobNotFound, RequeueDisabled, SchedulerError, SchedulerOutputError, SchedulerUnavailable
from krea_runner.model import JobRecord, JobState

# ------------------------------------------------------------------------------------------------------------ squeue

# In `squeue -O` a field takes a suffix, and with one it is neither padded nor cut at 20 columns. The last three fields are free
# text (a state description, a name, a comment: bars, line breaks and all), so each ends with a character that no line has.
TEXT_END, ROW_END = "\x1f", "\x1e"
JOB_FIELDS = (
    "JobArrayID", "State", "RestartCnt", "exit_code", "SubmitTime", "StartTime", "EndTime", "NodeList", "BatchHost",
    "Requeue", "UserName", "Reason", "Name", "Comment",
)  # fmt: skip
_ENDS = ("|",) * (len(JOB_FIELDS) - 3) + (TEXT_END, TEXT_END, ROW_END)
JOB_FORMAT = ",".join(f"{field}:{end}" for field, end in zip(JOB_FIELDS, _ENDS, strict=True))
_NOTHING = frozenset({"", "N/A", "n/a", "NONE", "None", "Unknown", "(null)", "None assigned"})


def parse_squeue(stdout: str, stderr: str = "", *, row_end: str = ROW_END) -> list[JobRecord]:
    """Records in the order printed, from `squeue -h -r` with JOB_FORMAT and epoch times. A comment may hold any characters:
    that it does not end its row is the business of who asks, with a `row_end` that nobody could know.

    Raises: SchedulerOutputError.
    """
    *rows, rest = stdout.split(f"{row_end}\n")
    if rest:
        raise unreadable("squeue", rest)
    if not rows and ": error:" in stderr:
        # 22.05.8: `Invalid job format specification` comes with exit code 0. Not "no jobs".
        raise unreadable("squeue", stderr)
    return [_job(row) for row in rows]


def _job(row: str) -> JobRecord:
    try:
        *values, text = row.split("|", len(JOB_FIELDS) - 3)
        job_id, word, restarts, status, submitted, started, ended, nodelist, batch_host, requeue, user = values
        reason, name, comment = text.split(TEXT_END, 2)
        state = job_state(word)
        # Before the end it is 0 and means nothing.
        code, number = _exit_code(status) if state.is_ended else (None, None)
        return JobRecord(
            job_id=_job_id(job_id),
            state=state,
            raw_state=word,
            reason=reason,
            restart_count=int(restarts),
            exit_code=code,
            signal=number,
            submitted_at=_epoch(submitted),
            started_at=_epoch(started),
            ended_at=_epoch(ended) if state.is_ended else None,
            limit_at=_epoch(ended) if state is JobState.RUNNING else None,
            nodelist=_text(nodelist),
            batch_node=_text(batch_host),
            requeue_allowed={"0": False, "1": True}.get(requeue),
            user=user,
            name=name,
            comment=_text(comment),
        )
    except ValueError as error:
        raise unreadable("squeue", row) from error


# ------------------------------------------------------------------------------------------------------------- sacct

SACCT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Start", "End", "NodeList", "Reason")


def parse_sacct_starts(stdout: str) -> dict[str, list[JobRecord]]:
    """The starts of each job, oldest first, from `sacct -D -X -P -n` with SACCT_FIELDS and epoch times.

    sacct 22.05 has no restart count: with -D it prints one row a start, in order, so it is the number of rows before
    (RESIZING rows, of a --no-kill job that lost a node, are not starts; nor is a second row of the same Submit, which
    every requeue sets anew, and Start). Exit codes are cut to seven bits: 137 reads as
    9:0 (22.05, 24.11; whole in 26.05). The row of an attempt that was requeued after its end reads REQUEUED, whatever it
    was before.
    Raises: SchedulerOutputError.
    """
    starts: dict[str, list[JobRecord]] = {}
    for line in stdout.splitlines():
        values = line.split("|", len(SACCT_FIELDS) - 1)
        if len(values) != len(SACCT_FIELDS):
            raise unreadable("sacct", line)
        record = _accounted(line, values)
        known = starts.setdefault(record.job_id, [])
        if known and (known[-1].state is JobState.RESIZING or _is_same_start(known[-1], record)):
            known.pop()
        known.append(replace(record, restart_count=len(known)))
    return starts


def _is_same_start(one: JobRecord, other: JobRecord) -> bool:
    same = one.submitted_at is not None and one.submitted_at == other.submitted_at
    return same and one.started_at in {None, other.started_at}


def parse_sacct(stdout: str) -> list[JobRecord]:
    """The last start of each job, for jobs that squeue no longer knows. A row that has not ended, of a job that the
    controller does not know, is UNKNOWN: one of the two is behind.

    Raises: SchedulerOutputError.
    """
    last = [starts[-1] for starts in parse_sacct_starts(stdout).values()]
    return [
        replace(record, requeue_allowed=False)  # what the controller has forgotten cannot be requeued
        if record.state.is_ended
        else replace(record, state=JobState.UNKNOWN, raw_state=f"{record.raw_state} (sacct, not in squeue)")
        for record in last
    ]


def _accounted(line: str, values: list[str]) -> JobRecord:
    job_id, word, exit_code, submitted, started, ended, nodelist, reason = values
    try:
        code, number = _exit_code(exit_code)
        return JobRecord(
            job_id=_job_id(job_id),
            state=job_state(word),
            raw_state=word,
            reason=reason,
            exit_code=code,
            signal=number,
            submitted_at=_epoch(submitted),
            started_at=_epoch(started),
            ended_at=_epoch(ended),
            nodelist=_text(nodelist),
        )
    except ValueError as error:
        raise unreadable("sacct", line) from error


# --------------------------------------------------------------------------------------------------- shared by the two


def job_state(word: str) -> JobState:
    """`CANCELLED by 1001` (sacct) is CANCELLED; a word that is not in the list is UNKNOWN."""
    try:
        return JobState(word.partition(" by ")[0])
    except ValueError:
        return JobState.UNKNOWN


def answers(asked: Iterable[str], records: Iterable[JobRecord]) -> dict[str, JobRecord]:
    """The records by the ids that were asked for. The id of a whole array is no one job: its state is UNKNOWN."""
    found = {record.job_id: record for record in records}
    result: dict[str, JobRecord] = {}
    for job_id in asked:
        tasks = sum(other.startswith(f"{job_id}_") for other in found)
        if job_id in found:
            result[job_id] = found[job_id]
        elif tasks:
            result[job_id] = JobRecord(job_id, JobState.UNKNOWN, f"an array of {tasks} tasks")
    return result


def _job_id(text: str) -> str:
    """`123+0`, the leader of a heterogeneous job, is what sbatch, requeue and scancel call `123`."""
    return text.removesuffix("+0")


def _exit_code(text: str) -> tuple[int, int]:
    """Code and signal: `7:0`, or, from squeue 22.05, what wait(2) gives (1792 is exit code 7, 9 is signal 9)."""
    code, colon, number = text.partition(":")
    if colon:
        return int(code), int(number)
    return int(code) >> 8 & 0xFF, int(code) & 0x7F


def _epoch(text: str) -> float | None:
    return None if text in _NOTHING else float(int(text))


def _text(text: str) -> str:
    return "" if text in _NOTHING else text


def unreadable(command: str, text: str) -> SchedulerOutputError:
    return SchedulerOutputError(f"reading {command}: not what was asked for: {printable(text, 200)!r}", line=text)


# ------------------------------------------------------------------------------------------------- sbatch and scontrol


def parse_submitted(stdout: str) -> str:
    """The job id from `sbatch --parsable`, `123` or `123;cluster`; a site's wrapper may print lines before it.

    Raises: SchedulerOutputError.
    """
    for line in reversed(stdout.splitlines()):
        if match := re.fullmatch(r"(\d+)(;\S+)?", line.strip()):
            return match[1]
    raise unreadable("sbatch", stdout)


def parse_config(stdout: str) -> Mapping[str, str]:
    """`scontrol show config` as pairs; the headings between them are left out."""
    pairs = (line.partition(" = ") for line in stdout.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


# ---------------------------------------------------------------------------------------------------------- refusals

_ASK = "ask the controller: scontrol ping"
_OWNER = "only the job's owner or an operator may do that"
# What a command that failed said, what that means, what to type next. The first match wins. The first group is all of
# Slurm's own errors of communication (slurm_errno.c, 22.05.8): no answer, so nothing is known.
_REFUSALS: tuple[tuple[str, type[SchedulerError], str], ...] = (
    (r"Munge|uthentication", SchedulerUnavailable, "does munged run on this host? munge -n | unmunge"),
    (
        r"PersistInit|slurm_persist_conn|to the database|connect to database|Database connection",
        SchedulerUnavailable,
        "slurmdbd does not answer: sacctmgr ping",
    ),
    (
        # scontrol requeue and update say "Unexpected message received" when there is no controller.
        r"Unable to contact slurm controller|Socket timed out|Unexpected message received|standby mode"
        r"|Message (send|receive) failure|Communication (connection|shutdown) failure|Zero Bytes were transmitted"
        r"|is DOWN|Insane message length|Header lengths are longer|Incompatible versions of client and server"
        r"|Connection (refused|reset|timed out)|Transport endpoint|No route to host|Network is unreachable",
        SchedulerUnavailable,
        _ASK,
    ),
    (
        r"configuration source|Unable to process configuration|Can't find an address|fetch_config",
        SchedulerUnavailable,
        'the command found no cluster: echo "$SLURM_CONF"; is this a login node?',
    ),
    (r"try again", SchedulerUnavailable, ""),
    (r"Invalid job id specified", JobNotFound, "your jobs: squeue --me"),
    (
        r"operation is presently disabled",
        RequeueDisabled,
        "it was submitted with --no-requeue: scontrol update jobid=JOB requeue=1",
    ),
    (r"Job is pending execution", SchedulerError, "it waits in the queue already: squeue --me"),
    (r"Access/permission denied|Invalid user id", SchedulerError, _OWNER),
    (
        r"No partition specified",
        SchedulerError,
        'the cluster has no default one: [slurm] partition = "NAME", of those in: sinfo -s',
    ),
    (r"Invalid partition", SchedulerError, "the partitions: sinfo -s"),
    (
        r"Invalid account|Invalid qos|accounting/QOS policy",
        SchedulerError,
        "what you may use: sacctmgr show assoc user=$USER format=account,partition,qos",
    ),
    (
        r"node configuration is not available|Invalid feature|Invalid generic resource|More processors requested",
        SchedulerError,
        "what the nodes have: sinfo -N -o '%N %c %m %G %f'",
    ),
)  # fmt: skip


def read_refusal(said: str) -> tuple[type[SchedulerError], str]:
    """What a failed command's words mean, and a hint (empty: none). Words never seen before are a plain refusal."""
    for pattern, kind, hint in _REFUSALS:
        if re.search(pattern, said):
            return kind, hint
    return SchedulerError, ""


ACCOUNTING_OFF = "accounting storage is disabled"


def printable(text: str, limit: int = 500) -> str:
    """One line for people: no control characters, no `sbatch: error:` before each sentence."""
    sentences = (re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in text[: 8 * limit].splitlines())
    line = "; ".join(sentence for sentence in sentences if any(map(str.isalnum, sentence)))
    return "".join(character if character.isprintable() else "?" for character in line)[:limit]
