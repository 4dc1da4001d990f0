"""One pass of the supervisor over all runs of a user: observe → diagnose → decide → act, and one sentence a run."""

import socket
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

from krea_runner.clock import Clock
from krea_runner.decide.decision import RESTARTS, Case, decide
from krea_runner.diagnose.end import diagnose_end, end_of, exit_codes, is_held_by_slurm
from krea_runner.diagnose.hang import judge_hang
from krea_runner.errors import (
    ConfigError,
    FilesUnavailable,
    HistoryUnavailable,
    KreaRunnerError,
    SchedulerError,
    fault_line,
)
from krea_runner.history.last_watch import last_watch
from krea_runner.history.store import History, Lease, LeaseLost
from krea_runner.history.ticks import TickRecord, record_tick
from krea_runner.model import (
    ActionStage,
    Attempt,
    AttemptKey,
    DecisionKind,
    Finding,
    Incident,
    JobRecord,
    JobState,
    Run,
    RunConfig,
    RunState,
    Snapshot,
    Symptom,
    Watch,
)
from krea_runner.observe.answered import begin_round
from krea_runner.observe.snapshot import observe
from krea_runner.schedulers import Scheduler
from krea_runner.schedulers.nodelist import NodelistError, expand
from krea_runner.supervise.act import SAME_SUBMIT_S, Work, carry_out, is_the_runs_own, refused_starts
from krea_runner.supervise.attempts import action_for, closed, last_sign_mono, note_recovery, queue_line, updated
from krea_runner.supervise.collect import begin_collections
from krea_runner.supervise.diagnosis import diagnosed, keep_diagnosis, refine
from krea_runner.supervise.evidence import evidence_document, write_evidence
from krea_runner.supervise.lease import take_leases
from krea_runner.supervise.saving import new_warnings
from krea_runner.supervise.start_from import start_of
from krea_runner.supervise.step_back import stepped_back
from krea_runner.supervise.submissions import LOST_SUBMISSION_S, end_ghosts, find_submission
from krea_runner.supervise.supervisor import RunLine, Supervisor, TickReport
from krea_runner.transport.mirror import looked_at_together

# How long one tick may spend on carrying out actions; the rest is the next tick's.
ACT_S = 20.0
# A job that Slurm does not know (any more) may still have ranks somewhere: this long without a sign of them first.
GONE_S = 60.0
# How long one tick may read the logs of what has failed, of all runs together; with ACT_S well below the lease's time.
DIAGNOSIS_S = 20.0

_STATE_AFTER = {
    DecisionKind.HOLD: RunState.HELD,
    DecisionKind.STOP: RunState.STOPPED,
    DecisionKind.DONE: RunState.DONE,
}


def tick(supervisor: Supervisor) -> TickReport:
    """Raises: HistoryError (nothing can be remembered, so nothing is done). A scheduler that cannot be asked is in the
    report, not raised."""
    with supervisor.history.kept_open():
        return _tick(supervisor, supervisor.history, supervisor.clock)


def _tick(supervisor: Supervisor, history: History, clock: Clock) -> TickReport:
    report = TickReport()
    begin_round()
    supervisor.diagnosis_left_s = DIAGNOSIS_S
    runs = {
        run.run_id: run
        for run in history.list_runs(user=supervisor.user, states=[s for s in RunState if s.is_supervised])
        + history.runs_with_open_actions(user=supervisor.user)
    }
    # A job of theirs may still come: a submission that was under way when they were stopped.
    stopped = history.list_runs(
        user=supervisor.user, states=[RunState.STOPPED], changed_since=clock.wall() - LOST_SUBMISSION_S
    )
    for endpoint in sorted({run.config.endpoint for run in [*runs.values(), *stopped]}):
        _tick_group(supervisor, endpoint, [run for run in runs.values() if run.config.endpoint == endpoint], report)
    if not supervisor.dry_run:
        record_tick(history, TickRecord(socket.gethostname(), supervisor.user, clock.wall(), report.blind))
    return report


def _tick_group(supervisor: Supervisor, endpoint: str, runs: list[Run], report: TickReport) -> None:
    """All runs of one scheduler: leases first, so that what is then asked cannot be outdated by another supervisor."""
    history, clock = supervisor.history, supervisor.clock
    supervisor.starts, supervisor.nodes, supervisor.hung = None, None, {}
    leases: dict[int, Lease] = {}
    work: list[Work] = []
    try:
        leases = _leases(supervisor, runs)
        for run in runs:
            if run.run_id not in leases:
                holder = history.lease_holder(run.run_id) or "another supervisor"
                report.lines.append(RunLine(run, f"left to {holder}, who holds its lease"))
        ours = history.runs(leases)  # as they are under the lease
        under_way = history.open_actions(leases)
        scheduler = supervisor.open_scheduler(endpoint)
        supervisor.job_ids = [run.job_id for run in ours if run.job_id is not None]
        jobs = scheduler.my_jobs(supervisor.job_ids)
        with looked_at_together(_present_attempts(ours, jobs)):
            for run in ours:
                if run.run_id in under_way:
                    report.lines.append(RunLine(run, "an action is under way"))
                else:
                    look_at_it = partial(_tick_run, supervisor, scheduler, run, jobs, leases[run.run_id], report)
                    report.lines.append(_look_at(run, look_at_it))
        if not supervisor.dry_run:
            _save_quiet(history, report, leases)
            intended = history.open_actions(leases)
            work += [
                Work(run, scheduler, leases[run.run_id], intended[run.run_id]) for run in ours if run.run_id in intended
            ]
        looks = begin_collections(history, clock, scheduler, jobs, supervisor.hung, ours, work)
        carry_out(work, history, clock, deadline=clock.mono() + ACT_S + looks.longest_s, is_ready=looks.is_ready)
        looks.finish()
        report.lines += end_ghosts(supervisor, scheduler, jobs, just_replaced={item.action.job_id for item in work})
    except (SchedulerError, FilesUnavailable, ConfigError) as error:
        settled = {line.run.run_id for line in report.lines} - {
            item.run.run_id for item in work if item.action.stage.is_open
        }
        unseen = [run for run in runs if run.run_id not in settled]
        report.lines += [RunLine(run, _unseen(error), blind=True) for run in unseen]
    finally:
        report.lines += [RunLine(item.run, _action_line(item), news=True) for item in work]
        if not supervisor.dry_run:
            history.drop_leases(leases.values())


def _look_at(run: Run, look: Callable[[], RunLine]) -> RunLine:
    """What is wrong with one run, or with our own eyes for it, keeps nobody from looking at the others."""
    try:
        return look()
    except LeaseLost as error:
        return RunLine(run, str(error))
    except HistoryUnavailable:
        raise
    except KreaRunnerError as error:
        return RunLine(run, _unseen(error), blind=True)
    except Exception as error:  # noqa: BLE001
        return RunLine(run, f"could not see, {fault_line(error)}", blind=True)


def _unseen(error: KreaRunnerError) -> str:
    return f"could not see: {error}" + (f" ({error.hint})" if error.hint else "")


def _present_attempts(runs: list[Run], jobs: Mapping[str, JobRecord]) -> list[tuple[RunConfig, AttemptKey]]:
    found = [(run.config, jobs.get(run.job_id or "")) for run in runs if run.state is RunState.ACTIVE]
    return [(config, AttemptKey(job.job_id, job.restart_count)) for config, job in found if job is not None]


def _leases(supervisor: Supervisor, runs: list[Run]) -> dict[int, Lease]:
    if supervisor.dry_run:  # nothing will be written, so nothing needs to be kept from others
        return {run.run_id: Lease(run.run_id, supervisor.holder, generation=-1) for run in runs}
    ids = [run.run_id for run in runs]
    return take_leases(supervisor.history, ids, supervisor.holder, supervisor.clock.wall())


def _action_line(item: Work) -> str:
    action = item.action
    state = (
        action.stage.lower()
        if not action.stage.is_open
        else f"under way ({action.stage.lower()}), the next tick goes on"
    )
    said = "; ".join(filter(None, [action.detail, item.trouble]))
    return f"{action.kind.lower()} of job {action.job_id} {state}" + (f": {said}" if said else "")


# ------------------------------------------------------------------------------------------------------------ one run


def _tick_run(
    supervisor: Supervisor,
    scheduler: Scheduler,
    run: Run,
    jobs: Mapping[str, JobRecord],
    lease: Lease,
    report: TickReport,
) -> RunLine:
    history = supervisor.history
    if run.state is RunState.SUBMITTING:
        return find_submission(supervisor, run, jobs)
    if not run.state.is_supervised:
        return RunLine(run, f"{run.state.lower()}: {run.state_reason}")
    job = jobs.get(run.job_id) if run.job_id else None
    known = history.attempts(run.run_id)
    latest = known[-1] if known else None
    if job is None or not is_the_runs_own(job, run, latest):
        return _job_gone(supervisor, run, latest, lease)
    if job.state is JobState.UNKNOWN:
        return RunLine(
            run,
            f"could not see: job {job.job_id} is {job.raw_state!r}, which says nothing we know",
            blind=True,
        )
    if latest is not None and latest.key.job_id == job.job_id and latest.key.restart_count > job.restart_count:
        told, seen = job.restart_count, latest.key.restart_count
        return RunLine(run, f"could not see: told of restart {told} when {seen} is on record", blind=True)

    if job.state is JobState.COMPLETING and job.restart_count > (latest.key.restart_count if latest else 0):
        return RunLine(run, "requeued, its last start is still ending")  # how, is not told before it has
    line = _settle_past(supervisor, scheduler, run, job, known, lease)
    attempt, before = _attempt_of(supervisor, run, job, known)
    snapshot = observe(run, job, attempt, _remembered(supervisor, attempt), supervisor.clock)
    if job.state.is_ended:
        snapshot = replace(snapshot, accounted=_accounted(supervisor, scheduler, attempt.key, known))
    finding = _diagnose(supervisor, scheduler, snapshot)
    attempt = updated(attempt, snapshot, finding)
    snapshot = replace(snapshot, attempt=attempt)
    hang = judge_hang(snapshot)
    snapshot, newly_slow = _slow_is_said(snapshot, hang.is_slow)
    quiet = line is None and finding is None and hang.finding is None and job.state is not JobState.COMPLETED
    if not supervisor.dry_run:
        if not quiet:
            history.save_observations((attempt, snapshot.watch))
        _remember(supervisor, attempt, snapshot.watch)
        note_recovery(history, run, before, snapshot)
    warned = new_warnings(supervisor, snapshot) if quiet else []
    if quiet:
        report.snapshots.append(snapshot)
        text = hang.line if job.state is JobState.RUNNING else queue_line(job)
        return RunLine(run, "; ".join([text, *warned]), blind=hang.blind, news=newly_slow or bool(warned))
    return line or _conclude(supervisor, snapshot, attempt, finding or hang.finding, lease)


def _slow_is_said(snapshot: Snapshot, is_slow: bool) -> tuple[Snapshot, bool]:
    """Becoming slow is news once; remembered with the watch, so that cron does not mail it each minute."""
    watch = snapshot.watch
    if watch is None or not is_slow or watch.slow_said:
        return snapshot, False
    return replace(snapshot, watch=replace(watch, slow_said=True)), True


def _conclude(
    supervisor: Supervisor, snapshot: Snapshot, attempt: Attempt, finding: Finding | None, lease: Lease
) -> RunLine:
    history, run = supervisor.history, snapshot.run
    if finding is None:
        if not supervisor.dry_run:
            history.set_run_state(run.run_id, RunState.DONE, "completed", now=snapshot.wall_at)
        return RunLine(run, "done: the job completed", news=True)
    return _handle(supervisor, snapshot, attempt, finding, lease)


def _save_quiet(history: History, report: TickReport, runs: Container[int]) -> None:
    quiet = [snapshot for snapshot in report.snapshots if snapshot.run.run_id in runs]
    history.save_observations(*((one.attempt, one.watch) for one in quiet if one.attempt is not None))


def _handle(
    supervisor: Supervisor,
    snapshot: Snapshot,
    attempt: Attempt,
    finding: Finding,
    lease: Lease,
    *,
    may_act: bool = True,
) -> RunLine:
    """Decide about a failure and commit it; the action is carried out once all runs have been looked at. Without `may_act` it
    is only put on record: the job has been started again, and ended again, since."""
    history, run = supervisor.history, snapshot.run
    earlier = history.incidents(run_id=run.run_id)
    on_record = next((incident for incident in earlier if incident.attempt == attempt.key), None)
    if on_record is not None:
        return _on_record(supervisor, snapshot, on_record)
    finding, told = diagnosed(supervisor, replace(snapshot, attempt=attempt), finding)
    start = start_of(run.config, snapshot.checkpoints, now=snapshot.wall_at, dry_run=supervisor.dry_run or not may_act)
    job = snapshot.job
    back, held = job is not None and job.restart_count > attempt.key.restart_count, is_held_by_slurm(job)
    decision = decide(
        Case(
            finding=finding,
            policy=run.config.policy,
            earlier=earlier,
            checkpoint_step=start.step,
            exit_codes=frozenset(exit_codes(snapshot)),
            now=snapshot.wall_at,
            checkpoints_unseen=bool(snapshot.checkpoints.problems),
            requeue_allowed=job.requeue_allowed if job else False,
            back_in_queue=back,
            held_by=held if back else "",
        )
    )
    if may_act:
        attempts = history.attempts(run.run_id)
        decision = stepped_back(
            snapshot, attempt, finding, decision, earlier, attempts, start, dry_run=supervisor.dry_run
        )
    line = RunLine(run, f"{finding.line} → {decision.kind}: {decision.reason}", news=True)
    if supervisor.dry_run:
        return line
    kind = action_for(decision, finding, back=back, held=held) if may_act else None
    history.record_incident(
        lease,
        attempt,
        finding,
        decision,
        checkpoint_step=start.step,
        now=supervisor.clock.wall(),
        run_state=_STATE_AFTER.get(decision.kind) if may_act else None,
        action=None if kind is None else (kind, attempt.key.restart_count),
    )
    document = supervisor.hung[run.run_id] = evidence_document(snapshot, finding)
    write_evidence(run.config, attempt.key, document)
    keep_diagnosis(snapshot, told)
    return line


def _on_record(supervisor: Supervisor, snapshot: Snapshot, incident: Incident) -> RunLine:
    """What was decided is being waited for, or never came about: then a person is asked, not each tick told the same."""
    run, decision = snapshot.run, incident.decision
    if not supervisor.dry_run:
        supervisor.hung.setdefault(run.run_id)
    text = f"{incident.finding.summary}; on record, decided: {decision.kind} ({decision.reason})"
    ended = snapshot.job is None or snapshot.job.state.is_ended
    if not ended or decision.kind not in RESTARTS or supervisor.dry_run:
        return RunLine(run, text)
    why = f"the {decision.kind} that was decided never came about. Look at the job, then: krea-runner resume {run.config.slug}"
    supervisor.history.set_run_state(run.run_id, RunState.HELD, why, now=snapshot.wall_at)
    return RunLine(run, f"{text}; held: {why}", news=True)


def _job_gone(supervisor: Supervisor, run: Run, attempt: Attempt | None, lease: Lease) -> RunLine:
    """The scheduler answered and does not know the job: purged, or its memory was lost. What the attempt left behind says how
    it ended; a sign of life from its ranks says that it has not."""
    unknown = f"could not see: job {run.job_id} is not known to the scheduler"
    if attempt is None or attempt.key.job_id != run.job_id:
        if supervisor.dry_run:
            return RunLine(run, unknown, blind=True)
        attempt = supervisor.history.add_attempt(run.run_id, AttemptKey(run.job_id or "?"), now=supervisor.clock.wall())
    snapshot = observe(run, None, attempt, _remembered(supervisor, attempt), supervisor.clock)
    if not supervisor.dry_run:
        supervisor.history.save_observations((attempt, snapshot.watch))
        _remember(supervisor, attempt, snapshot.watch)
    end, finding = end_of(snapshot), diagnose_end(snapshot)
    if end is not None and end.state is JobState.COMPLETED and finding is None:
        if not supervisor.dry_run:
            supervisor.history.set_run_state(
                run.run_id, RunState.DONE, "completed (its script says so)", now=snapshot.wall_at
            )
        return RunLine(run, "done: the script ended well, Slurm has forgotten the job", news=True)
    silent_s = snapshot.mono - last_sign_mono(snapshot)
    if finding is None or (finding.cause == "record_purged" and silent_s < GONE_S):
        return RunLine(run, f"{unknown}; its ranks silent for {silent_s:.0f} of {GONE_S:.0f} s", blind=True)
    line = _handle(supervisor, snapshot, attempt, finding, lease)
    if not supervisor.dry_run:
        ended = closed(attempt, snapshot, finding)
        supervisor.history.save_observations((ended, snapshot.watch))
    return line


# ----------------------------------------------------------------------------------------------------------- attempts


def _attempt_of(
    supervisor: Supervisor, run: Run, job: JobRecord, known: Sequence[Attempt]
) -> tuple[Attempt, Attempt | None]:
    """The job's present attempt, and the one before it when a border was just crossed or not long ago."""
    key = AttemptKey(job.job_id, job.restart_count)
    if not known or known[-1].key != key:
        known = supervisor.history.attempts(run.run_id)  # with those that have just been settled
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
    # Of a new attempt nothing is known but what the run's earlier ones taught.
    return in_memory if in_memory is not None else last_watch(supervisor.history, attempt.run_id)


def _remember(supervisor: Supervisor, attempt: Attempt, watch: Watch | None) -> None:
    if watch is None:
        supervisor.memory.pop(attempt.attempt_id, None)
    else:
        supervisor.memory[attempt.attempt_id] = watch


def _settle_past(
    supervisor: Supervisor, scheduler: Scheduler, run: Run, job: JobRecord, attempts: Sequence[Attempt], lease: Lease
) -> RunLine | None:
    """Close every start of the job before its present one. One that is on no incident of ours was ended, or at least requeued,
    by somebody else: that is an incident, and nothing to do twice. Returns what was said of the last of them."""
    history = supervisor.history
    known = {attempt.key: attempt for attempt in attempts}
    if supervisor.dry_run or (
        not known and job.comment != run.tag
    ):  # taken over in mid-life: what was before is not ours
        return None
    first = min((key.restart_count for key in known if key.job_id == job.job_id), default=0)
    past = [AttemptKey(job.job_id, count) for count in range(first, job.restart_count)]
    unsettled = [key for key in past if key not in known or known[key].ended_at is None]
    recorded = {one.attempt: one for one in history.incidents(run_id=run.run_id)} if unsettled else {}
    ours = [one for one in history.actions(run.run_id) if one.job_id == job.job_id] if unsettled else []
    carried_out = [one for one in ours if one.stage in {ActionStage.STARTED, ActionStage.DONE}]
    refused = refused_starts(ours)
    line = None
    for key in unsettled:
        count = key.restart_count
        attempt = known.get(key) or history.add_attempt(run.run_id, key, now=supervisor.clock.wall())
        snapshot = observe(run, job, attempt, None, supervisor.clock)
        snapshot = replace(snapshot, accounted=_accounted(supervisor, scheduler, key, attempts), watch=None)
        if key in refused:
            ended = replace(closed(attempt, snapshot, None), end_state=JobState.LAUNCH_FAILED, ended_by="slurm")
        elif key in recorded:  # a hang, ended by us unless somebody was faster
            by = "krea-runner" if any(one.restart_count == count for one in carried_out) else ""
            ended = replace(closed(attempt, snapshot, None), end_state=JobState.REQUEUED, ended_by=by)
            refine(supervisor, snapshot, recorded[key])
        else:
            finding = _diagnose(supervisor, scheduler, snapshot)
            ended = closed(attempt, snapshot, finding)
            if finding is not None:
                last = replace(job, restart_count=count + 1) if count + 1 < job.restart_count else job
                latest = key == past[-1]
                line = _handle(supervisor, replace(snapshot, job=last), ended, finding, lease, may_act=latest)
        history.save_observations((ended, history.watch(attempt.attempt_id)))
    return line


def _diagnose(supervisor: Supervisor, scheduler: Scheduler, snapshot: Snapshot) -> Finding | None:
    """With the one question about nodes, where a node failed and nothing that the attempt left behind says which."""
    finding, attempt = diagnose_end(snapshot), snapshot.attempt
    if finding is None or finding.symptom is not Symptom.NODE_FAIL or finding.node or attempt is None:
        return finding
    told = snapshot.accounted.nodelist if snapshot.accounted else ""
    try:
        if supervisor.nodes is None:
            supervisor.nodes = scheduler.nodes()
        names = expand(told or attempt.nodelist)
    except (SchedulerError, NodelistError):
        return finding
    down = tuple(name for name in names if name in supervisor.nodes and supervisor.nodes[name].is_out)
    return diagnose_end(replace(snapshot, down_nodes=down))


def _accounted(
    supervisor: Supervisor, scheduler: Scheduler, key: AttemptKey, known: Sequence[Attempt]
) -> JobRecord | None:
    """Accounting's row of an attempt that has ended. It is a witness, not a condition: without its answer the rest is judged
    alone. It is asked once a tick, for all jobs."""
    if supervisor.starts is None:
        try:
            supervisor.starts = scheduler.starts(supervisor.job_ids)
        except SchedulerError:
            supervisor.starts = {}
    starts = supervisor.starts.get(key.job_id, [])
    first = next((attempt for attempt in known if attempt.key == AttemptKey(key.job_id)), None)
    if first is not None and first.submitted_at is not None:  # what was submitted before is another job, of the same id
        since = first.submitted_at - SAME_SUBMIT_S
        own = [start for start in starts if start.submitted_at is None or start.submitted_at >= since]
        starts = [replace(start, restart_count=count) for count, start in enumerate(own)] if own != starts else starts
    return next((start for start in starts if start.restart_count == key.restart_count), None)


# ------------------------------------------------------------------------------------------------- between two ticks


def look(supervisor: Supervisor, report: TickReport) -> bool:
    """Read the heartbeats of the last tick's running jobs again, without asking the scheduler. True when there is news that
    the next tick should not wait for: a hang, the end of a script, the first step after a restart."""
    running = [
        (snapshot.run, snapshot.job, snapshot.attempt)
        for snapshot in report.snapshots
        if snapshot.attempt is not None and snapshot.job is not None and snapshot.job.state is JobState.RUNNING
    ]
    due = False
    begin_round()
    with looked_at_together([(run.config, attempt.key) for run, _, attempt in running]):
        for run, job, attempt in running:
            try:
                again = observe(run, job, attempt, supervisor.memory.get(attempt.attempt_id), supervisor.clock)
            except FilesUnavailable:
                continue  # the next tick says so
            _remember(supervisor, attempt, again.watch)
            stepped = attempt.first_step is None and again.watch is not None and again.watch.step is not None
            due = due or stepped or judge_hang(again).finding is not None or again.script_end is not None
    return due
