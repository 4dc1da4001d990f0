"""How did the attempt end? Pure: the scheduler's word, the script's own, and srun's first complaint."""

import re
import signal

from krea_runner.model import Attempt, Finding, JobRecord, JobState, Snapshot, Suspect, Symptom

# `srun: error: n2: task 3: Exited with exit code 5`, `...: tasks 6-7: Terminated` (srun 22.05.8, -K)
_SRUN = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+?)\s*$", re.MULTILINE)
# What srun says of the ranks that it ends itself once one has failed: fallout, not the beginning.
_FALLOUT = frozenset({"Terminated"})
_SIGNAL_WORDS = {
    "Killed": "SIGKILL",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
}

# end state -> (symptom, cause); a state that is not here ends the matter (COMPLETED) or is not an end
_ENDS: dict[JobState, tuple[Symptom, str]] = {
    JobState.FAILED: (Symptom.CRASH, "unknown"),
    JobState.OUT_OF_MEMORY: (Symptom.CRASH, "out_of_memory"),
    JobState.LAUNCH_FAILED: (Symptom.CRASH, "launch_failed"),
    JobState.RECONFIG_FAIL: (Symptom.CRASH, "launch_failed"),
    JobState.NODE_FAIL: (Symptom.NODE_FAIL, "node_fail"),
    JobState.BOOT_FAIL: (Symptom.NODE_FAIL, "boot_fail"),
    JobState.TIMEOUT: (Symptom.TIME_LIMIT, "time_limit"),
    JobState.DEADLINE: (Symptom.TIME_LIMIT, "deadline"),
    JobState.PREEMPTED: (Symptom.PREEMPTED, "preempted"),
    JobState.CANCELLED: (Symptom.CANCELLED, "cancelled"),
    JobState.REVOKED: (Symptom.CANCELLED, "revoked"),
}


def diagnose_end(snapshot: Snapshot) -> Finding | None:
    """None when the job has not ended, or has ended well."""
    job = snapshot.job
    if job is None or job.state not in _ENDS:
        return None
    symptom, cause = _ENDS[job.state]
    watch = snapshot.watch
    step = max((rank.step for rank in watch.ranks), default=-1) if watch else -1
    said = f"Slurm says {job.raw_state}" + (f", reason {job.reason}" if job.reason not in {"", "None"} else "")
    evidence = [said, f"exit code {exit_word(snapshot)}"]
    suspects: tuple[Suspect, ...] = ()
    node, summary = "", f"{symptom.value.replace('_', ' ')}: job {job.job_id} ended {job.raw_state}"
    if symptom is Symptom.CRASH:
        first = _first_failure(snapshot.log.tail)
        if first is None:
            summary = f"crash: job {job.job_id} ended {job.raw_state} ({exit_word(snapshot)})"
        else:
            node, rank, how = first
            if cause == "unknown":
                cause = "rank_killed" if how in _SIGNAL_WORDS else "rank_failed"
            how = f"died of {_SIGNAL_WORDS[how]}" if how in _SIGNAL_WORDS else how[:1].lower() + how[1:]
            summary = f"crash: rank {rank} on {node} {how}"
            suspects = (Suspect("rank", rank, how), Suspect("node", node, how))
            evidence.append(f"srun's first complaint: {node}: task {rank}: {how}")
    if step >= 0:
        summary += f", at step {step}"
    return Finding(
        symptom=symptom,
        cause=cause,
        summary=summary,
        node=node,
        step=step if step >= 0 else None,
        last_progress_at=job.ended_at if job.ended_at is not None else (watch.moved_wall_at if watch else None),
        evidence=tuple(evidence),
        suspects=suspects,
    )


def diagnose_requeued_elsewhere(attempt: Attempt, job: JobRecord, step: int | None) -> Finding:
    """The job came back with a higher restart count and we did not ask for it: Slurm (node failure, preemption) or a
    person did. Slurm 22.05 does not say which without accounting."""
    return Finding(
        symptom=Symptom.REQUEUED_ELSEWHERE,
        cause="unknown",
        summary=f"requeued by Slurm or a person, not by us: job {job.job_id} is at restart {job.restart_count}",
        step=step,
        evidence=(f"attempt {attempt.key} was live; Slurm now says {job.raw_state}, reason {job.reason or 'none'}",),
    )


def exit_word(snapshot: Snapshot) -> str:
    """The exit code as Slurm writes it, `code:signal`, with the script's own where the two differ."""
    job, end = snapshot.job, snapshot.script_end
    code = job.exit_code if job and job.exit_code is not None else 0
    number = job.signal if job and job.signal else 0
    word = f"{code}:{number}"
    if number:
        word += f" {_signal_name(number)}"
    if end is not None and end.exit_code != code:
        word += f"; the script itself ended with {end.exit_code}"
    return word


def exit_codes(snapshot: Snapshot) -> set[int]:
    """Every exit code anybody reported of this attempt: Slurm's, the script's, the first failing rank's."""
    codes = {snapshot.job.exit_code} if snapshot.job else set()
    if snapshot.script_end is not None:
        codes.add(snapshot.script_end.exit_code)
    first = _first_failure(snapshot.log.tail)
    if first is not None and (match := re.search(r"exit code (\d+)", first[2])):
        codes.add(int(match[1]))
    return {code for code in codes if code is not None}


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
