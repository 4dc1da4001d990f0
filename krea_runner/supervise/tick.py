"""One pass of the supervisor over all runs of a user: observe → diagnose → decide → act, and one sentence a run."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from krea_runner.clock import Clock
from krea_runner.decide.decision import Case, decide
from krea_runner.diagnose.end import diagnose_end, diagnose_requeued_elsewhere, exit_codes
from krea_runner.diagnose.hang import judge_hang
from krea_runner.errors import FilesUnavailable, HistoryUnavailable, SchedulerError
from krea_runner.history.store import History, Lease, LeaseLost, TickRecord
from krea_runner.model import (
    ActionKind,
    Attempt,
    AttemptKey,
    DecisionKind,
    Finding,
    Incident,
    JobRecord,
    JobState,
    Run,
    RunState,
    Snapshot,
    Watch,
)
from krea_runner.observe.snapshot import observe
from krea_runner.schedulers import Scheduler
from krea_runner.supervise.act import Work, carry_out
from krea_runner.supervise.evidence import keep_evidence
from krea_runner.supervise.lease import take_lease

# How long one tick may spend on carrying out actions; the rest is the next tick's.
ACT_S = 20.0
# A submission whose answer was lost is looked for this long before a person is asked.
LOST_SUBMISSION_S = 600.0

_STATE_AFTER = {
    DecisionKind.HOLD: RunState.HELD,
    DecisionKind.STOP: RunState.STOPPED,
    DecisionKind.DONE: RunState.DONE,
}


@dataclass(frozen=True, slots=True)
class RunLine:
    """What one tick says of one run. `news`: something was decided or done, worth a line in a log."""

    run: Run
    text: str
    news: bool = False
    blind: bool = False


@dataclass(slots=True)
class TickReport:
    lines: list[RunLine] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    """Of the runs in which this tick found nothing wrong; the loop goes on watching these."""
    error: HistoryUnavailable | None = None
    """Set when the history could not be used: nothing was looked at, nothing was done."""

    @property
    def blind(self) -> str:
        """Why this tick could not see, for the first run it could not see; empty when it saw all."""
        if self.error is not None:
            return str(self.error)
        return next((f"{line.run.name}: {line.text}" for line in self.lines if line.blind), "")


@dataclass(slots=True)
class Supervisor:
    """What a tick needs. `memory` keeps each attempt's watch between looks of the same process, finer than the history
    does between ticks."""

    history: History
    open_scheduler: Callable[[str], Scheduler]
    clock: Clock
    user: str
    holder: str
    dry_run: bool = False
    memory: dict[int, Watch] = field(default_factory=dict)


def tick(supervisor: Supervisor) -> TickReport:
    """Raises: HistoryError (nothing can be remembered, so nothing is done). A scheduler that cannot be asked is in the
    report, not raised."""
    history, clock = supervisor.history, supervisor.clock
    report = TickReport()
    runs = {
        run.run_id: run
        for run in history.list_runs(user=supervisor.user, states=[s for s in RunState if s.is_supervised])
        + history.runs_with_open_actions(user=supervisor.user)
    }
    for endpoint in sorted({run.config.endpoint for run in runs.values()}):
        _tick_group(supervisor, endpoint, [run for run in runs.values() if run.config.endpoint == endpoint], report)
    if not supervisor.dry_run:
        history.record_tick(TickRecord(socket.gethostname(), supervisor.user, clock.wall(), report.blind))
    return report


def _tick_group(supervisor: Supervisor, endpoint: str, runs: list[Run], report: TickReport) -> None:
    """All runs of one scheduler: leases first, so that what is then asked cannot be outdated by another supervisor."""
    history, clock = supervisor.history, supervisor.clock
    leases: dict[int, Lease] = {}
    work: list[Work] = []
    try:
        for run in runs:
            lease = _lease(supervisor, run)
            if lease is not None:
                leases[run.run_id] = lease
            else:
                holder = history.lease_holder(run.run_id) or "another supervisor"
                report.lines.append(RunLine(run, f"left to {holder}, who holds its lease"))
        ours = [history.run(run_id) for run_id in leases]  # as they are under the lease
        scheduler = supervisor.open_scheduler(endpoint)
        jobs = scheduler.jobs([run.job_id for run in ours if run.job_id is not None])
        for run in ours:
            job = jobs.get(run.job_id) if run.job_id else None
            try:
                line = _tick_run(supervisor, scheduler, run, job, leases[run.run_id], report)
            except FilesUnavailable as error:
                line = RunLine(run, f"could not see: {error}", blind=True)
            report.lines.append(line)
            action = None if supervisor.dry_run else history.open_action(run.run_id)
            if action is not None:
                work.append(Work(run, scheduler, leases[run.run_id], action))
        carry_out(work, history, clock, deadline=clock.mono() + ACT_S)
    except (SchedulerError, FilesUnavailable) as error:
        settled = {line.run.run_id for line in report.lines} - {
            item.run.run_id for item in work if item.action.stage.is_open
        }
        unseen = [run for run in runs if run.run_id not in settled]
        report.lines += [RunLine(run, f"could not see: {error}", blind=True) for run in unseen]
    except LeaseLost as error:
        report.lines.append(RunLine(runs[0], str(error)))
    finally:
        report.lines += [RunLine(item.run, _action_line(item), news=True) for item in work]
        if not supervisor.dry_run:
            for lease in leases.values():
                history.drop_lease(lease)


def _lease(supervisor: Supervisor, run: Run) -> Lease | None:
    if supervisor.dry_run:  # nothing will be written, so nothing needs to be kept from others
        return Lease(run.run_id, supervisor.holder, generation=-1)
    return take_lease(supervisor.history, run.run_id, supervisor.holder, supervisor.clock.wall())


def _action_line(item: Work) -> str:
    action = item.action
    state = (
        action.stage.lower()
        if not action.stage.is_open
        else f"under way ({action.stage.lower()}), the next tick goes on"
    )
    return f"{action.kind.lower()} of job {action.job_id} {state}" + (f": {action.detail}" if action.detail else "")


# ------------------------------------------------------------------------------------------------------------ one run


def _tick_run(
    supervisor: Supervisor,
    scheduler: Scheduler,
    run: Run,
    job: JobRecord | None,
    lease: Lease,
    report: TickReport,
) -> RunLine:
    history = supervisor.history
    if run.state is RunState.SUBMITTING:
        return _find_submission(supervisor, scheduler, run)
    if not run.state.is_supervised or history.open_action(run.run_id) is not None:
        return RunLine(run, "an action is under way")
    if job is None:
        return _job_gone(supervisor, run)
    if job.state is JobState.UNKNOWN:
        return RunLine(
            run,
            f"could not see: job {job.job_id} is {job.raw_state!r}, which says nothing we know",
            blind=True,
        )

    latest = history.latest_attempt(run.run_id)
    if latest is not None and latest.key.job_id == job.job_id and latest.key.restart_count > job.restart_count:
        told, known = job.restart_count, latest.key.restart_count
        return RunLine(run, f"could not see: told of restart {told} when {known} is on record", blind=True)

    attempt, before = _attempt_of(supervisor, run, job)
    snapshot = observe(run, job, attempt, _remembered(supervisor, attempt), supervisor.clock)
    attempt = _update_attempt(attempt, snapshot)
    snapshot = replace(snapshot, attempt=attempt)
    if not supervisor.dry_run:
        history.save_observation(attempt, snapshot.watch)
        _remember(supervisor, attempt, snapshot.watch)
        _note_recovery(history, run, before, snapshot)

    if before is not None and before.ended_at is None:
        line = _border(supervisor, run, before, job, lease, snapshot)
        if line is not None:
            return line
    if job.state is JobState.COMPLETED:
        if not supervisor.dry_run:
            history.set_run_state(run.run_id, RunState.DONE, "completed", now=snapshot.wall_at)
        return RunLine(run, "done: the job completed", news=True)
    hang = judge_hang(snapshot)
    finding = diagnose_end(snapshot) or hang.finding
    if finding is None:
        report.snapshots.append(snapshot)
        text = hang.line if job.state is JobState.RUNNING else _queue_line(job)
        return RunLine(run, text, blind=hang.blind)
    return _handle(supervisor, snapshot, attempt, finding, lease)


def _handle(supervisor: Supervisor, snapshot: Snapshot, attempt: Attempt, finding: Finding, lease: Lease) -> RunLine:
    """Decide about a failure and commit it; the action is carried out once all runs have been looked at."""
    history, run = supervisor.history, snapshot.run
    earlier = history.incidents(run_id=run.run_id)
    if any(incident.attempt == attempt.key for incident in earlier):
        return RunLine(run, f"{finding.summary}; on record, waiting for what was decided")
    newest = snapshot.checkpoints.newest
    checkpoint_step = newest.step if newest else None
    decision = decide(
        Case(
            finding=finding,
            policy=run.config.policy,
            earlier=earlier,
            checkpoint_step=checkpoint_step,
            exit_codes=frozenset(exit_codes(snapshot)),
            now=snapshot.wall_at,
            requeue_allowed=snapshot.job.requeue_allowed if snapshot.job else None,
        )
    )
    line = RunLine(run, f"{finding.summary} → {decision.kind}: {decision.reason}", news=True)
    if supervisor.dry_run:
        return line
    requeue = decision.kind is DecisionKind.REQUEUE
    history.record_incident(
        lease,
        attempt,
        finding,
        decision,
        checkpoint_step=checkpoint_step,
        now=supervisor.clock.wall(),
        run_state=_STATE_AFTER.get(decision.kind),
        action=(ActionKind.REQUEUE, attempt.key.restart_count) if requeue else None,
    )
    keep_evidence(snapshot, finding)
    return line


def _find_submission(supervisor: Supervisor, scheduler: Scheduler, run: Run) -> RunLine:
    """The answer to the submission was lost: the job carries our tag, if it exists."""
    found = scheduler.find_by_tag(run.tag)
    now = supervisor.clock.wall()
    if found:
        if not supervisor.dry_run:
            supervisor.history.set_submitted(run.run_id, found[0].job_id, now=now)
        return RunLine(run, f"found its job {found[0].job_id} by its tag", news=True)
    if now - run.created_at < LOST_SUBMISSION_S:
        return RunLine(run, "submitted, no job id yet: looking for its tag", blind=True)
    why = "its submission never reached the scheduler"
    if not supervisor.dry_run:
        supervisor.history.set_run_state(run.run_id, RunState.STOPPED, why, now=now)
    return RunLine(run, f"{why}; submit it again", news=True)


def _job_gone(supervisor: Supervisor, run: Run) -> RunLine:
    """The scheduler answered and does not know the job: purged, or its memory was lost. Not an end by itself."""
    attempt = supervisor.history.latest_attempt(run.run_id)
    snapshot = observe(run, None, attempt, None, supervisor.clock)
    if snapshot.script_end is not None and snapshot.script_end.exit_code == 0:
        if not supervisor.dry_run:
            supervisor.history.set_run_state(
                run.run_id, RunState.DONE, "completed (its script says so)", now=snapshot.wall_at
            )
        return RunLine(run, "done: the script ended well, Slurm has forgotten the job", news=True)
    return RunLine(run, f"could not see: job {run.job_id} is not known to the scheduler", blind=True)


# ----------------------------------------------------------------------------------------------------------- attempts


def _attempt_of(supervisor: Supervisor, run: Run, job: JobRecord) -> tuple[Attempt, Attempt | None]:
    """The job's present attempt, and the one before it when a border was just crossed or not long ago."""
    key = AttemptKey(job.job_id, job.restart_count)
    known = supervisor.history.attempts(run.run_id)
    before = next((attempt for attempt in reversed(known) if attempt.key != key), None)
    for attempt in known:
        if attempt.key == key:
            return attempt, before
    now = supervisor.clock.wall()
    if supervisor.dry_run:
        return Attempt(0, run.run_id, key, now), before
    return supervisor.history.add_attempt(run.run_id, key, now=now), before


def _remembered(supervisor: Supervisor, attempt: Attempt) -> Watch | None:
    in_memory = supervisor.memory.get(attempt.attempt_id)
    return in_memory if in_memory is not None else supervisor.history.watch(attempt.attempt_id)


def _remember(supervisor: Supervisor, attempt: Attempt, watch: Watch | None) -> None:
    if watch is None:
        supervisor.memory.pop(attempt.attempt_id, None)
    else:
        supervisor.memory[attempt.attempt_id] = watch


def _update_attempt(attempt: Attempt, snapshot: Snapshot) -> Attempt:
    job, watch = snapshot.job, snapshot.watch
    if job is None or job.state.is_queued:
        return attempt
    step = max((rank.step for rank in watch.ranks), default=-1) if watch else -1
    ended = job.state.is_ended
    return replace(
        attempt,
        started_at=attempt.started_at if attempt.started_at is not None else job.started_at,
        ended_at=(job.ended_at or snapshot.wall_at) if ended else None,
        end_state=job.state if ended else None,
        exit_code=job.exit_code if ended else None,
        signal=job.signal if ended else None,
        nodelist=job.nodelist or attempt.nodelist,
        first_step=step if attempt.first_step is None and step >= 0 else attempt.first_step,
        last_step=step if step >= 0 else attempt.last_step,
    )


def _border(
    supervisor: Supervisor, run: Run, before: Attempt, job: JobRecord, lease: Lease, snapshot: Snapshot
) -> RunLine | None:
    """Close the attempt that was live when we last looked. When its end is on no record of ours, somebody else
    requeued the job: that is an incident, and nothing to do twice."""
    history = supervisor.history
    ours = any(incident.attempt == before.key for incident in history.incidents(run_id=run.run_id))
    closed = replace(before, ended_at=snapshot.wall_at, end_state=JobState.REQUEUED)
    if supervisor.dry_run:
        return None
    line = None
    if not ours:
        line = _handle(supervisor, snapshot, closed, diagnose_requeued_elsewhere(before, job, before.last_step), lease)
    history.save_observation(closed, history.watch(before.attempt_id))
    return line


def _note_recovery(history: History, run: Run, before: Attempt | None, snapshot: Snapshot) -> None:
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


def _queue_line(job: JobRecord) -> str:
    reason = f" ({job.reason})" if job.reason not in {"", "None"} else ""
    return f"{job.raw_state.lower()}{reason}"


# ------------------------------------------------------------------------------------------------- between two ticks


def look(supervisor: Supervisor, report: TickReport) -> bool:
    """Read the heartbeats of the last tick's running jobs again, without asking the scheduler. True when there is news that
    the next tick should not wait for: a hang, the end of a script, the first step after a restart."""
    due = False
    for snapshot in report.snapshots:
        attempt, job = snapshot.attempt, snapshot.job
        if attempt is None or job is None or job.state is not JobState.RUNNING:
            continue
        try:
            again = observe(snapshot.run, job, attempt, supervisor.memory.get(attempt.attempt_id), supervisor.clock)
        except FilesUnavailable:
            continue  # the next tick says so
        _remember(supervisor, attempt, again.watch)
        stepped = attempt.first_step is None and any(beat.step >= 0 for beat in again.heartbeats.ranks)
        due = due or stepped or judge_hang(again).finding is not None or again.script_end is not None
    return due
