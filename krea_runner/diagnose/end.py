"""How did the attempt end, and who ended it? Pure: the scheduler's word, accounting's, the script's own, the log's notices.

One ladder for all attempts: what the scheduler says of the attempt itself, then what is left of it when the scheduler speaks
of its next start, or has forgotten the job. docs/reference/job-endings.md is the table; the tests are made from it.
"""

import re
import signal
from dataclasses import dataclass

from krea_runner.model import Finding, JobRecord, JobState, Snapshot, Suspect, Symptom

# `srun: error: n2: task 3: Exited with exit code 5`, `...: tasks 6-7: Terminated` (srun 22.05.8, -K)
_SRUN = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+?)\s*$", re.MULTILINE)
# What srun says of the ranks that it ends itself once one has failed: fallout, not the beginning.
_FALLOUT = frozenset({"Terminated"})
_SIGNAL_WORDS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Out Of Memory": "SIGKILL",
}
_OOM_WORD = "Out Of Memory"
_OOM = re.compile(r"^slurmstepd-(?P<node>\S+): error: Detected \d+ oom[-_]kill event", re.MULTILINE)
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.MULTILINE)
_RAN_IN_TMP = re.compile(r"error: couldn't chdir to [`'](?P<path>.*?)': .*going to /tmp instead")
_NO_WORKDIR = re.compile(
    r"^krea_runner: cannot enter (?P<path>.*)$", re.MULTILINE
)  # job.sbatch says so and exits with 78
# `slurmstepd-n1: error: *** JOB 8 ON n1 CANCELLED AT 2026-12-02T13:27:56 DUE TO NODE FAILURE, SEE ... ***` (22.05, 24.11;
# 26.05 has a time in the place of the daemon's name). Without a reason it was scancel.
_NOTICE = re.compile(r"\*\*\* JOB \S+ ON (?P<node>\S+) CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+))?")
_NOTICES = {
    None: JobState.CANCELLED,
    "PREEMPTION": JobState.PREEMPTED,
    "TIME LIMIT": JobState.TIMEOUT,
    "NODE FAILURE": JobState.NODE_FAIL,
    "JOB REQUEUE": JobState.REQUEUED,
}

# end state -> (symptom, cause, who); a state that is not here ends the matter (COMPLETED) or is not an end
_ENDS: dict[JobState, tuple[Symptom, str, str]] = {
    JobState.FAILED: (Symptom.CRASH, "unknown", "job"),
    JobState.OUT_OF_MEMORY: (Symptom.CRASH, "out_of_memory", "slurm"),
    JobState.LAUNCH_FAILED: (Symptom.CRASH, "launch_failed", "slurm"),
    JobState.RECONFIG_FAIL: (Symptom.CRASH, "launch_failed", "slurm"),
    JobState.NODE_FAIL: (Symptom.NODE_FAIL, "node_fail", "slurm"),
    JobState.BOOT_FAIL: (Symptom.NODE_FAIL, "boot_fail", "slurm"),
    JobState.TIMEOUT: (Symptom.TIME_LIMIT, "time_limit", "slurm"),
    JobState.DEADLINE: (Symptom.TIME_LIMIT, "deadline", "slurm"),
    JobState.PREEMPTED: (Symptom.PREEMPTED, "preempted", "slurm"),
    JobState.CANCELLED: (Symptom.CANCELLED, "cancelled", ""),
    JobState.REVOKED: (Symptom.CANCELLED, "revoked", "slurm"),
    JobState.REQUEUED: (Symptom.REQUEUED_ELSEWHERE, "unknown", ""),
}
_OUTPUT_UNWRITABLE = 53  # what Slurm reports as the signal of a script whose output it could not open (22.05.8)


@dataclass(frozen=True, slots=True)
class End:
    """What is known of the end of one attempt. `state` COMPLETED: it ended well; UNKNOWN: nothing is left to say how."""

    state: JobState
    exit_code: int | None = None
    signal: int | None = None
    source: str = ""


def end_of(snapshot: Snapshot) -> End | None:
    """None while the attempt goes on."""
    job, attempt = snapshot.job, snapshot.attempt
    present = job is not None and (attempt is None or _is_of(job, snapshot))
    if present and job is not None:
        return _end_by(job, snapshot, "Slurm says") if job.state.is_ended else None
    following = job is not None and attempt is not None and job.restart_count == attempt.key.restart_count + 1
    if following and is_held_by_slurm(job) == "launch":  # its script may have begun on the first node all the same
        return End(JobState.LAUNCH_FAILED, source="Slurm says")
    accounted = snapshot.accounted
    if accounted is not None and accounted.state.is_ended:
        return _end_by(accounted, snapshot, "accounting says")
    # Before the script's own word: a script that is told to end says 143, whoever told it and why.
    told = _notice(snapshot.log.tail)
    if told is not None:
        return End(told, source="its log says")
    if snapshot.script_end is not None:
        code = snapshot.script_end.exit_code
        if code == 0:
            return End(JobState.COMPLETED, 0, 0, "its script says")
        return End(JobState.FAILED, _true_code(snapshot, code), 0, "its script says")
    return End(JobState.UNKNOWN if job is None else JobState.REQUEUED)


def diagnose_end(snapshot: Snapshot) -> Finding | None:
    """None while the attempt goes on, or when it ended well."""
    end, job = end_of(snapshot), snapshot.job
    if end is None:
        return None
    if end.state is JobState.COMPLETED:
        return _ended_well_or_not(snapshot)
    if is_held_by_slurm(job) == "launch" and end.state in {JobState.REQUEUED, JobState.FAILED}:
        end = End(
            JobState.LAUNCH_FAILED, source="Slurm says"
        )  # its script may have begun on the first node all the same
    if job is None and end.state in {JobState.UNKNOWN, JobState.REQUEUED}:
        return _gone(snapshot, end)
    if end.state not in _ENDS:
        return None
    symptom, cause, by = _ENDS[end.state]
    if end.state is JobState.FAILED and snapshot.script_end is not None and snapshot.script_end.warned:
        said = f"time limit near: job {_job_id(snapshot)} was told to save and ended ({_exit_word(snapshot, end)})"
        return _finding(snapshot, Symptom.TIME_LIMIT, "time_limit_warning", "slurm", said)
    node = ""
    suspects: tuple[Suspect, ...] = ()
    evidence: list[str] = []
    word = str(end.state) if job is None or not job.state.is_ended else job.raw_state
    summary = f"{symptom.value.replace('_', ' ')}: job {_job_id(snapshot)} ended {word}"
    if symptom is Symptom.CRASH:
        cause, node, summary, suspects, evidence = _crash(snapshot, end, cause, summary)
    elif symptom is Symptom.NODE_FAIL:
        node = _failed_node(snapshot)
        summary = f"node failure: {node or 'a node'} of job {_job_id(snapshot)} went down"
        suspects = (Suspect("node", node, "went down under the job"),) if node else ()
    elif symptom is Symptom.CANCELLED:
        by = by or _canceller(snapshot)
        summary = f"cancelled: job {_job_id(snapshot)}, {f'by {by}' if by else 'by whom Slurm does not say here'}"
    elif symptom is Symptom.REQUEUED_ELSEWHERE and job is not None:
        cause = "requeue_hold" if is_held_by_slurm(job) == "requeue" else cause
        summary = f"requeued by Slurm or a person, not by us: job {job.job_id} is at restart {job.restart_count}"
    return _finding(snapshot, symptom, cause, by, summary, node, suspects, evidence)


def is_held_by_slurm(job: JobRecord | None) -> str:
    """`launch`: a node could not start it (its prolog failed) and Slurm put it back, held. `crash`: of an expedited job (25.11
    and newer) that exited with an error. `requeue`: by somebody's `scontrol requeuehold`. Empty: not, or by a person."""
    if job is None or not job.state.is_queued:
        return ""
    reason = job.reason.replace("_", " ")
    if reason == "launch failed requeued held":
        return "launch"
    if reason == "job requeued in held state":
        return "crash" if job.state is JobState.REQUEUE_HOLD else "requeue"
    return ""


def exit_word(snapshot: Snapshot) -> str:
    """The exit code as Slurm writes it, `code:signal`, with the script's own where the two differ."""
    return _exit_word(snapshot, end_of(snapshot) or End(JobState.UNKNOWN))


def exit_codes(snapshot: Snapshot) -> set[int]:
    """Every exit code anybody reported of this attempt: Slurm's, the script's, the first failing rank's."""
    end = end_of(snapshot)
    codes = {end.exit_code} if end else set()
    if snapshot.script_end is not None:
        codes.add(snapshot.script_end.exit_code)
    return {code for code in codes if code is not None}


# -------------------------------------------------------------------------------------------------------------- kinds


def _crash(
    snapshot: Snapshot, end: End, cause: str, summary: str
) -> tuple[str, str, str, tuple[Suspect, ...], list[str]]:
    """Cause, node, summary, suspects and evidence of a job that failed."""
    job = snapshot.job
    word = _exit_word(snapshot, end)
    summary = f"crash: job {_job_id(snapshot)} ended {end.state} ({word})"
    if cause == "launch_failed":
        return cause, "", f"launch failed: job {_job_id(snapshot)} could not start on a node and is held", (), []
    if end.signal == _OUTPUT_UNWRITABLE:
        node = job.batch_node if job else ""
        return "output_unwritable", node, f"crash: the job's output could not be opened on {node or 'its node'}", (), []
    if (match := _NO_WORKDIR.search(snapshot.log.tail)) and end.exit_code == 78:
        node = job.batch_node if job else ""
        return "no_workdir", node, f"crash: the job could not enter {match['path']!r} on {node or 'its node'}", (), []
    first = _first_failure(snapshot.log.tail)
    if first is None:
        killed = _OOM.search(snapshot.log.tail)
        node = killed["node"] if killed else (job.batch_node if job else "")
        if killed or cause == "out_of_memory":
            how = "killed for want of memory"
            return (
                "out_of_memory",
                node,
                f"crash: the job's script on {node} was {how}",
                (Suspect("node", node, how),),
                [],
            )
        if cause == "unknown":
            cause = "script_killed" if end.signal else "exit_code"
        return cause, node, summary, (), []
    node, rank, how = first
    if cause == "unknown":
        cause = "out_of_memory" if how == _OOM_WORD else "rank_killed" if how in _SIGNAL_WORDS else "rank_failed"
    evidence = [f"srun's first complaint: {node}: task {rank}: {how}"]
    if how == _OOM_WORD:
        how = "was killed for want of memory"
    else:
        how = f"died of {_SIGNAL_WORDS[how]}" if how in _SIGNAL_WORDS else how[:1].lower() + how[1:]
    return (
        cause,
        node,
        f"crash: rank {rank} on {node} {how}",
        (Suspect("rank", rank, how), Suspect("node", node, how)),
        evidence,
    )


def _gone(snapshot: Snapshot, end: End) -> Finding:
    """Slurm has forgotten the job, or never knew it, and nothing that it left says how it ended."""
    ran = snapshot.attempt is not None and (snapshot.attempt.started_at is not None or snapshot.log.tail != "")
    if ran and end.state is JobState.UNKNOWN:
        said = f"crash: Slurm has forgotten job {_job_id(snapshot)}, and it left no word of its end"
        return _finding(snapshot, Symptom.CRASH, "record_purged", "", said)
    said = f"job {_job_id(snapshot)} is gone from the queue without having started: cancelled, or forgotten by its controller"
    return _finding(snapshot, Symptom.CRASH, "vanished", "", said)


def _ended_well_or_not(snapshot: Snapshot) -> Finding | None:
    """COMPLETED is the script's exit code, no more. Ours hides nothing; another may have run in /tmp, or end with an echo."""
    if snapshot.script_end is not None:
        return None
    if match := _RAN_IN_TMP.search(snapshot.log.tail):
        said = f"bad directory: job {_job_id(snapshot)} ran in /tmp, {match['path']!r} was not there; Slurm calls that COMPLETED"
        return _finding(snapshot, Symptom.CRASH, "ran_in_tmp", "job", said)
    if first := _first_failure(snapshot.log.tail):
        node, rank, how = first
        said = f"hidden failure: job {_job_id(snapshot)} COMPLETED, but its rank {rank} on {node}: {how}"
        return _finding(snapshot, Symptom.CRASH, "hidden_failure", "job", said, node)
    return None


def _finding(
    snapshot: Snapshot,
    symptom: Symptom,
    cause: str,
    by: str,
    summary: str,
    node: str = "",
    suspects: tuple[Suspect, ...] = (),
    evidence: list[str] | None = None,
) -> Finding:
    job, watch, end = snapshot.job, snapshot.watch, end_of(snapshot)
    step = watch.step if watch is not None and watch.step is not None else -1
    if step < 0 and snapshot.attempt is not None and snapshot.attempt.last_step is not None:
        step = snapshot.attempt.last_step
    said = "Slurm does not know the job" if job is None else f"Slurm says {job.raw_state}"
    if job is not None and job.reason not in {"", "None"}:
        said += f", reason {job.reason}"
    if job is not None and not _is_of(job, snapshot):
        said += f", at restart {job.restart_count}"
    told = [said]
    if end is not None:
        told.append(f"{end.source} {end.state}, exit code {_exit_word(snapshot, end)}".strip())
    return Finding(
        symptom=symptom,
        cause=cause,
        summary=summary + (f", at step {step}" if step >= 0 else ""),
        node=node,
        by=by,
        step=step if step >= 0 else None,
        last_progress_at=_last_progress_at(snapshot),
        evidence=(*told, *(evidence or ())),
        suspects=suspects,
    )


# ------------------------------------------------------------------------------------------------------------ details


def _notice(tail: str) -> JobState | None:
    """What Slurm itself wrote last into the job's log about its end; None where it wrote nothing that we know."""
    if _NODE_FAILURE.search(tail):
        return JobState.NODE_FAIL
    for match in reversed(list(_NOTICE.finditer(tail))):
        return _NOTICES.get(match["why"].strip() if match["why"] else None)
    return None


def _end_by(record: JobRecord, snapshot: Snapshot, source: str) -> End:
    if record.state in {JobState.NODE_FAIL, JobState.BOOT_FAIL}:
        return End(record.state, source=source)  # 0:15 of 22.05, 0:1 of 26.05: it says nothing
    code = record.exit_code
    if record.state is JobState.FAILED and not record.signal:
        code = _true_code(snapshot, code)
    return End(record.state, code, record.signal, source)


def _true_code(snapshot: Snapshot, code: int | None) -> int | None:
    """Of the rank that failed first; else the script's own. srun says 143 once it has ended the other ranks (-K), and accounting
    cuts to seven bits: 137 reads as 9:0 (22.05.8)."""
    first = _first_failure(snapshot.log.tail)
    if first is not None and (number := _rank_code(first[2])) is not None:
        return number
    return snapshot.script_end.exit_code if snapshot.script_end is not None else code


def _rank_code(how: str) -> int | None:
    if match := re.search(r"exit code (\d+)", how):
        return int(match[1])
    name = _SIGNAL_WORDS.get(how)
    return None if name is None else 128 + signal.Signals[name]


def _is_of(job: JobRecord, snapshot: Snapshot) -> bool:
    """Whether the record speaks of this attempt, not of a later start."""
    attempt = snapshot.attempt
    return attempt is None or (job.job_id, job.restart_count) == (attempt.key.job_id, attempt.key.restart_count)


def _job_id(snapshot: Snapshot) -> str:
    if snapshot.attempt is not None:
        return snapshot.attempt.key.job_id
    return snapshot.job.job_id if snapshot.job else "?"


def _last_progress_at(snapshot: Snapshot) -> float | None:
    job, watch = snapshot.job, snapshot.watch
    if job is not None and job.ended_at is not None and _is_of(job, snapshot):
        return job.ended_at
    if snapshot.accounted is not None and snapshot.accounted.ended_at is not None:
        return snapshot.accounted.ended_at
    if snapshot.script_end is not None:
        return snapshot.script_end.at
    return watch.moved_wall_at if watch else None


def _canceller(snapshot: Snapshot) -> str:
    """`CANCELLED by alice`: accounting alone knows."""
    record = snapshot.accounted
    return record.raw_state.partition(" by ")[2] if record is not None else ""


def _failed_node(snapshot: Snapshot) -> str:
    match = _NODE_FAILURE.search(snapshot.log.tail)
    return match["node"] if match else ",".join(snapshot.down_nodes)


def _exit_word(snapshot: Snapshot, end: End) -> str:
    word = f"{end.exit_code or 0}:{end.signal or 0}"
    if end.signal:
        word += f" {_signal_name(end.signal)}"
    own = snapshot.script_end
    if own is not None and own.exit_code != (end.exit_code or 0):
        word += f"; the script itself ended with {own.exit_code}"
    return word


def _first_failure(tail: str) -> tuple[str, str, str] | None:
    """Node, first task and what happened to it, of the first complaint that is not fallout. One single rank that died of a
    signal comes before those that exited: they may have lost it, and srun does not report in the order of deaths. Several
    may be the ones that srun had to kill."""
    complaints = [match for match in _SRUN.finditer(tail) if match["how"] not in _FALLOUT]
    signalled = [match for match in complaints if match["how"] in _SIGNAL_WORDS]
    alone = len(signalled) == 1 and signalled[0]["tasks"].isdigit()
    for match in signalled if alone else complaints:
        return match["node"], re.split("[,-]", match["tasks"])[0], match["how"]
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
