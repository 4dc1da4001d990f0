"""What a look teaches about an attempt: the pure part of a tick's bookkeeping."""

from dataclasses import replace

from krea_runner.diagnose.end import end_of
from krea_runner.history.store import History
from krea_runner.model import (
    ActionKind,
    Attempt,
    Decision,
    DecisionKind,
    Finding,
    Incident,
    JobRecord,
    JobState,
    Run,
    Snapshot,
    Symptom,
)


def updated(attempt: Attempt, snapshot: Snapshot, finding: Finding | None) -> Attempt:
    job, watch = snapshot.job, snapshot.watch
    if job is None:
        return attempt
    if attempt.submitted_at is None:
        attempt = replace(attempt, submitted_at=job.submitted_at)
    if job.state.is_queued:
        return attempt
    step = watch.step if watch is not None and watch.step is not None else -1
    attempt = replace(
        attempt,
        started_at=attempt.started_at if attempt.started_at is not None else job.started_at,
        nodelist=job.nodelist if len(job.nodelist) >= len(attempt.nodelist) else attempt.nodelist,
        first_step=step if attempt.first_step is None and step >= 0 else attempt.first_step,
        last_step=step if step >= 0 else attempt.last_step,
    )
    return closed(attempt, snapshot, finding) if job.state.is_ended else attempt


def closed(attempt: Attempt, snapshot: Snapshot, finding: Finding | None) -> Attempt:
    """With its end: the state, code and signal, when, on which node, by whom."""
    end = end_of(snapshot)
    if end is None:
        return attempt
    job, accounted = snapshot.job, snapshot.accounted
    told = job if job is not None and job.restart_count == attempt.key.restart_count else accounted
    ended_at = (told.ended_at if told else None) or (
        snapshot.script_end.at if snapshot.script_end else snapshot.wall_at
    )
    return replace(
        attempt,
        started_at=attempt.started_at if attempt.started_at is not None or told is None else told.started_at,
        ended_at=ended_at,
        end_state=end.state,
        exit_code=end.exit_code,
        signal=end.signal,
        nodelist=attempt.nodelist or (told.nodelist if told else ""),
        end_node=finding.node if finding else "",
        ended_by=finding.by if finding else "job",
    )


def note_recovery(history: History, run: Run, before: Attempt | None, snapshot: Snapshot) -> None:
    """The restart that followed an incident: when it ran, when it stepped."""
    attempt, job = snapshot.attempt, snapshot.job
    if before is None or attempt is None or job is None or not job.state.is_live:
        return
    incident: Incident | None = next(
        (known for known in history.incidents(run_id=run.run_id) if known.attempt == before.key), None
    )
    if incident is None:
        return
    if incident.restarted_at is None and job.state is not JobState.COMPLETING:
        history.note_recovery(incident.incident_id, restarted_at=snapshot.wall_at)
    if incident.resumed_at is None and attempt.first_step is not None:
        history.note_recovery(incident.incident_id, resumed=(snapshot.wall_at, attempt.first_step))


def last_sign_mono(snapshot: Snapshot) -> float:
    watch = snapshot.watch
    if watch is None:
        return snapshot.mono
    others = [source.moved_mono for source in watch.sources if source.moved_mono is not None]
    return max([watch.since_mono, watch.log_moved_mono, *others, *(rank.flush_moved_mono for rank in watch.ranks)])


def queue_line(job: JobRecord) -> str:
    reason = f" ({job.reason})" if job.reason not in {"", "None"} else ""
    return f"{job.raw_state.lower()}{reason}"


def action_for(decision: Decision, finding: Finding, *, back: bool, held: str) -> ActionKind | None:
    if decision.kind is DecisionKind.REQUEUE:
        return ActionKind.RELEASE if back and held else ActionKind.REQUEUE
    if decision.kind is DecisionKind.RESUBMIT:
        return ActionKind.RESUBMIT
    slurms_own = decision.kind is DecisionKind.WAIT and finding.symptom in {Symptom.NODE_FAIL, Symptom.PREEMPTED}
    return ActionKind.START if back and slurms_own and not held else None
