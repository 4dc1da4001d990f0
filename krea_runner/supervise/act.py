"""Carries out one action, a step at a time. What was done is committed before the next step, so that a tick killed
anywhere is finished by the next one; what was asked for is verified by reading the scheduler again.

The requeue dance (Slurm 22.05 to 26.05; measured, docs/design/requeue.md): `requeue`, wait until the job reads PENDING,
wait for the next whole second, lift the start time. Slurm's own delay of 121 s is only the fallback. A job that Slurm has
requeued by itself only needs the end of the dance, after `release` where it holds it.

Where a requeue is not possible the same script is submitted as a new job of the run. Its tag is committed before, so that a
submission whose answer was lost is looked for, and repeated only when the scheduler has long answered without it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from krea_runner.clock import Clock
from krea_runner.diagnose.end import end_of, is_held_by_slurm
from krea_runner.errors import (
    HistoryError,
    JobNotFound,
    RequeueDisabled,
    SchedulerError,
    SchedulerUnavailable,
    fault_line,
)
from krea_runner.history.store import History, Lease, LeaseLost
from krea_runner.model import Action, ActionKind, ActionStage, Attempt, AttemptKey, JobRecord, JobState, Run, RunState
from krea_runner.observe.answered import answered
from krea_runner.observe.snapshot import observe
from krea_runner.rundir import RunDir
from krea_runner.schedulers import Scheduler
from krea_runner.supervise.exclude import Places, start_elsewhere, submit_elsewhere
from krea_runner.transport.mirror import mirrored

# A start in the same whole second as the kill is refused; this much past the next one was always accepted (102 of 102).
SECOND_MARGIN_S = 0.15
# StartTime further ahead than this was set by the requeue itself and not lifted yet.
LIFTED_S = 5.0
# Between two looks: a tenth of the time that has passed, within these. A job that is slow to end is asked for less often.
POLL_S, SLOWEST_POLL_S = 0.1, 1.0
FRESH_S = 0.5
# SubmitTime is in whole seconds.
SAME_SUBMIT_S = 2.0
# What Slurm still says of a job whose start time was just lifted; any other reason (Resources, Priority, ...) means that
# our part is done and the queue decides.
_ABOUT_TO_START = frozenset({"", "None", "BeginTime"})
# After this long of answers without the tag among the user's jobs, a submission is taken for lost: sbatch gives up after 60 s.
SUBMIT_AGAIN_S = 90.0
# Slurm shows a release at once.
HELD_S = 10.0
LOOKED = "its tag is on none of your jobs yet"
CANCEL_SENT = "cancel of the old job sent"
SLOW = "start refused by a revoked credential; requeued again, with Slurm's own delay"


@dataclass(slots=True)
class Work:
    """One open action and what is needed to carry it on. `lift_at`: when the start time may be lifted (wall clock)."""

    run: Run
    scheduler: Scheduler
    lease: Lease
    action: Action
    lift_at: float | None = None
    delayed_until: float | None = None
    """The start time that was to be lifted, on Slurm's clock: while the job still has it, it was not."""
    tag_is_new: bool = False
    """The tag was made by this very process and has not been submitted yet."""
    cancel_sent: bool = False
    releases: int = 0
    """Sent by this very process."""
    parked: bool = False
    """Nothing more can be done about it in this tick."""
    trouble: str = ""
    """Why not, where that is not the ordinary course of things."""
    round: "Round | None" = None


@dataclass(slots=True)
class Round:
    """One look at the jobs of all actions at once, however many there are: a hundred runs that crash together cost the
    controller what one does. Asked again when it is older than FRESH_S: a person may have cancelled meanwhile."""

    clock: Clock
    open_work: Sequence[Work]
    places: dict[int, Places]
    seen: dict[int, tuple[float, dict[str, JobRecord]]] = field(default_factory=dict)

    def job(self, work: Work) -> JobRecord | None:
        at, jobs = self.seen.get(id(work.scheduler), (-math.inf, {}))
        if self.clock.mono() - at > FRESH_S:
            ids = [item.action.job_id for item in self.open_work if item.scheduler is work.scheduler]
            at, jobs = self.clock.mono(), work.scheduler.jobs(list(dict.fromkeys(ids)))
            self.seen[id(work.scheduler)] = at, jobs
        return jobs.get(work.action.job_id)

    def places_of(self, work: Work) -> Places:
        ids = dict.fromkeys(item.action.job_id for item in self.open_work if item.scheduler is work.scheduler)
        return self.places.setdefault(id(work.scheduler), Places(work.scheduler, list(ids)))


def carry_out(
    work: list[Work],
    history: History,
    clock: Clock,
    *,
    deadline: float,
    is_ready: Callable[[Work], bool] = lambda _: True,
) -> None:
    """Advance all actions side by side until each is closed or `deadline` (monotonic) has passed; what is left open
    is the next tick's. One that is not ready (evidence is still collected) waits.

    One that the scheduler refuses, or that cannot go on for another reason, is left for the next tick with what was said of it,
    and holds up none of the others.
    Raises: SchedulerUnavailable (the actions stay open), HistoryUnavailable.
    """
    begun = clock.mono()
    places: dict[int, Places] = {}
    while left := [item for item in work if item.action.stage.is_open and not item.parked]:
        now = Round(clock, left, places)
        for item in left:
            item.round = now
            try:
                if is_ready(item):
                    _STEPS[item.action.kind](item, history, clock)
            except LeaseLost as error:
                item.parked, item.trouble = True, str(error)
            except (HistoryError, SchedulerUnavailable):
                raise
            except Exception as error:  # noqa: BLE001
                item.parked, item.trouble = True, fault_line(error)
        if clock.mono() >= deadline:
            return
        due = (item.lift_at - clock.wall() for item in left if item.lift_at is not None)
        pause = min(SLOWEST_POLL_S, max(POLL_S, (clock.mono() - begun) / 10))
        clock.sleep(min([pause, *(wait for wait in due if wait > 0)]))


# ------------------------------------------------------------------------------------------------------------ requeue


def _requeue(work: Work, history: History, clock: Clock) -> None:
    job = _read(work, history)
    if job is None:
        _forgotten(work, history, clock)
    elif job.state is JobState.CANCELLED:
        _give_up(work, history, clock, RunState.STOPPED, "cancelled from outside (scancel) before the requeue")
    elif job.state is not JobState.UNKNOWN:  # nothing is done about what nobody understands; the next read may
        _REQUEUE_STEPS[work.action.stage](work, job, history, clock)


def _forgotten(work: Work, history: History, clock: Clock) -> None:
    """Slurm forgets what ended a while ago, and a controller that lost its state everything. A job that waited in the queue
    can only have been cancelled, or lost."""
    action, config = work.action, work.run.config
    waited = action.kind is not ActionKind.REQUEUE or action.stage is not ActionStage.INTENDED
    key = AttemptKey(action.job_id, action.restart_count)
    attempt = next((one for one in history.attempts(work.run.run_id) if one.key == key), None)
    live = attempt is not None and attempt.ended_at is None and action.incident_id is not None
    end = end_of(observe(work.run, None, attempt, None, clock)) if live else None
    if end is not None and end.state is JobState.CANCELLED:
        _give_up(work, history, clock, RunState.STOPPED, "cancelled from outside (scancel) before the requeue")
    elif waited:
        why = "Slurm has forgotten the job while it waited: cancelled, or lost by the controller. To submit it again: "
        _give_up(work, history, clock, RunState.HELD, f"{why}krea-runner resume {config.slug}")
    else:
        _resubmit_instead(work, history, clock, "Slurm has forgotten the job")


def _ask(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    _ASKS[work.action.kind](work, job, history, clock)


def _ask_for_requeue(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    action = work.action
    if job.state is JobState.COMPLETED and action.incident_id is not None:  # without one, a person wants it to go on
        _give_up(work, history, clock, RunState.DONE, "completed before the requeue")
        return
    if job.restart_count <= action.restart_count and not job.state.is_queued:
        _still_ours(work, history)
        try:
            work.scheduler.requeue(action.job_id)
        except JobNotFound:
            _resubmit_instead(work, history, clock, "Slurm has forgotten the job")
            return
        except RequeueDisabled:
            _resubmit_instead(work, history, clock, "the job was submitted with --no-requeue")
            return
        except SchedulerError as error:
            if error.transient:
                raise
            again = work.scheduler.jobs([action.job_id]).get(action.job_id)
            if again is None or not (again.state.is_queued or again.restart_count > action.restart_count):
                _give_up(work, history, clock, RunState.HELD, f"requeue refused: {error}")
                return
            # Somebody else's requeue came in between, or one of ours that timed out.
    _advance(work, history, clock, ActionStage.REQUESTED, work.action.detail)


def _ask_for_release(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    """Only a hold that Slurm put on the job by itself: a person's may have come in its place."""
    if job.state.is_queued and is_held_by_slurm(job) in {"launch", "crash"}:
        _still_ours(work, history)
        try:
            work.scheduler.release(work.action.job_id)
            work.releases = 1
        except SchedulerError as error:
            if error.transient:
                raise
            _give_up(work, history, clock, RunState.HELD, f"release refused: {error}")
            return
    _advance(work, history, clock, ActionStage.REQUESTED, work.action.detail)


def _lift_start_time(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    if job.state is JobState.COMPLETING:
        return  # the old attempt is still ending
    if job.state.is_live or job.state.is_ended:
        if not _was_lost(work, job, history, clock):
            _advance(work, history, clock, ActionStage.STARTED, work.action.detail)
        return
    if not job.state.is_queued:
        return
    if work.action.detail != SLOW:
        if work.lift_at is None:
            work.lift_at = _next_second(work, clock.wall())
        if clock.wall() < work.lift_at:
            return
        _still_ours(work, history)
        work.delayed_until = job.started_at
        said = start_elsewhere(_places(work), work.run, work.action.job_id, history, clock.wall())
        _advance(work, history, clock, ActionStage.STARTED, said or work.action.detail)
    else:
        _advance(work, history, clock, ActionStage.STARTED, SLOW)


def _was_lost(work: Work, job: JobRecord, history: History, clock: Clock) -> bool:
    """At the old count, a controller that was killed within seconds of a change has forgotten it (22.05.8): our requeue is
    asked for again, and Slurm's own is no more ours to complete."""
    if job.restart_count > work.action.restart_count:
        return False
    if work.action.kind is ActionKind.REQUEUE:
        _advance(work, history, clock, ActionStage.INTENDED, work.action.detail)
    else:
        _advance(work, history, clock, ActionStage.DONE, f"overtaken: {job.raw_state} at restart {job.restart_count}")
    return True


def _next_second(work: Work, now: float) -> float:
    """When it is surely another whole second than that of the kill, for Slurm too; seen from outside the cluster nobody knows
    when its seconds begin."""
    if not work.scheduler.whole_second_starts:
        return now
    return (now if work.run.config.transport == "ssh" else math.floor(now)) + 1 + SECOND_MARGIN_S


def _verify_start(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    action = work.action
    if job.state is JobState.FAILED and _start_was_refused(work, job):
        work.lift_at = None
        _advance(work, history, clock, ActionStage.INTENDED, SLOW, restart_count=job.restart_count)
    elif job.state.is_queued:
        if work.delayed_until is not None:  # by one clock: ours may be off by minutes
            waits = job.started_at == work.delayed_until
        else:
            waits = job.started_at is not None and job.started_at > clock.wall() + LIFTED_S
        if waits and action.detail != SLOW:
            # The update came while the job was still COMPLETING, and was lost.
            work.delayed_until = job.started_at
            start_elsewhere(_places(work), work.run, action.job_id, history, clock.wall())  # said at the first time
        elif work.releases and job.reason.startswith("JobHeld"):
            _release_again(work, history, clock, job)
        elif job.reason not in _ABOUT_TO_START or action.detail == SLOW:
            _advance(work, history, clock, ActionStage.DONE, _joined(action.detail, f"queued: {job.reason}"))
    elif job.state is not JobState.COMPLETING and not _was_lost(work, job, history, clock):
        now = f"{job.raw_state} on {job.nodelist or '-'}"
        _advance(work, history, clock, ActionStage.DONE, _joined(action.detail, now))


def _release_again(work: Work, history: History, clock: Clock, job: JobRecord) -> None:
    """A release that came while Slurm was still putting its hold on is lost (seen on 24.11.5)."""
    if work.releases == 1:
        _still_ours(work, history)
        work.scheduler.release(job.job_id)
        work.releases = 2
    elif clock.wall() - work.action.updated_at > HELD_S:
        why = f"still held after two releases ({job.reason}). By hand: scontrol release {job.job_id}"
        _give_up(work, history, clock, RunState.HELD, why)


_Step = Callable[[Work, JobRecord, History, Clock], None]
_ASKS: dict[ActionKind, _Step] = {
    ActionKind.REQUEUE: _ask_for_requeue,
    ActionKind.RELEASE: _ask_for_release,
    ActionKind.START: _lift_start_time,
}
_REQUEUE_STEPS: dict[ActionStage, _Step] = {
    ActionStage.INTENDED: _ask,
    ActionStage.REQUESTED: _lift_start_time,
    ActionStage.STARTED: _verify_start,
}


def refused_starts(actions: Iterable[Action]) -> set[AttemptKey]:
    """Those that never ran, and that an action of ours asked for and put right: no incident, whoever looks at them later."""
    return {AttemptKey(one.job_id, one.restart_count) for one in actions if one.detail.startswith(SLOW)}


def _start_was_refused(work: Work, job: JobRecord) -> bool:
    """FAILED 1:0 without the script having said a word (22.05.8: "Killing non-startable batch JobId")."""
    attempt = AttemptKey(job.job_id, job.restart_count)
    if work.run.config.job_log is not None:  # an adopted job's script says nothing: the next tick takes it for a crash
        return False
    config = mirrored(work.run.config, attempt)
    never_began = not answered(config, config.run_dir, RunDir(config.run_dir).script_events(attempt).exists)
    refused = (job.exit_code, job.signal or 0) == (1, 0)  # not 15:53, an output that cannot be opened
    return refused and job.restart_count > work.action.restart_count and never_began


# ----------------------------------------------------------------------------------------------------------- resubmit


def _resubmit_instead(work: Work, history: History, clock: Clock, why: str) -> None:
    _advance(
        work, history, clock, ActionStage.INTENDED, f"{why}: submitted again as a new job", kind=ActionKind.RESUBMIT
    )


def _resubmit(work: Work, history: History, clock: Clock) -> None:
    if work.action.stage is ActionStage.INTENDED:
        _end_old_job(work, history, clock)
    elif work.tag_is_new:
        _submit(work, history, clock)
    else:
        found = work.scheduler.find_by_tag(work.run.tag)
        if found:
            _take_new_job(work, history, clock, found[0].job_id)
        elif LOOKED not in work.action.detail:  # the time counts from the first answer without it
            _advance(work, history, clock, ActionStage.REQUESTED, _joined(work.action.detail, LOOKED))
            work.parked = True
        elif clock.wall() - work.action.updated_at > SUBMIT_AGAIN_S:
            _advance(work, history, clock, ActionStage.REQUESTED, _without_looked(work.action.detail))
            _submit(work, history, clock)
        else:
            work.parked = True


def _end_old_job(work: Work, history: History, clock: Clock) -> None:
    """Never two live attempts of one run: the old job first, unless its id is another's by now."""
    job, action, config = _read(work, history), work.action, work.run.config
    if job is not None and job.state is JobState.UNKNOWN:
        return
    if job is not None and job.state is JobState.COMPLETED and action.incident_id is not None:
        _give_up(work, history, clock, RunState.DONE, "completed before it was submitted again")
    elif job is not None and job.state is JobState.CANCELLED and CANCEL_SENT not in action.detail:
        _give_up(
            work, history, clock, RunState.STOPPED, "cancelled from outside (scancel) before it was submitted again"
        )
    elif job is not None and not job.state.is_ended:
        if CANCEL_SENT not in action.detail:
            _advance(work, history, clock, ActionStage.INTENDED, f"{action.detail} {CANCEL_SENT}".strip())
        if not work.cancel_sent:
            _still_ours(work, history)
            work.scheduler.cancel(action.job_id)
            work.cancel_sent = True
    elif config.files == "mounted" and not answered(config, config.run_dir, RunDir(config.run_dir).script.is_file):
        why = "there is no batch script of ours to submit again; submit it by hand, then: krea-runner adopt JOBID"
        _give_up(work, history, clock, RunState.HELD, why)
    else:
        base = work.run.tag.partition(".")[0]
        tag = f"{base}.{action.action_id}"
        _advance(work, history, clock, ActionStage.REQUESTED, action.detail, tag=tag)
        work.run, work.tag_is_new = replace(work.run, tag=tag), True


def _submit(work: Work, history: History, clock: Clock) -> None:
    _still_ours(work, history)
    work.tag_is_new = False
    try:
        script = RunDir(work.run.config.run_dir).script
        job_id, said = submit_elsewhere(_places(work), work.run, script, work.action.job_id, history, clock.wall())
    except SchedulerError as error:
        if error.transient:
            raise
        _give_up(work, history, clock, RunState.HELD, f"not submitted again: {error}")
        return
    _take_new_job(work, history, clock, job_id, said)


def _take_new_job(work: Work, history: History, clock: Clock, job_id: str, said: str = "") -> None:
    detail = _joined(_without_looked(work.action.detail), f"job {job_id}", said)
    _advance(work, history, clock, ActionStage.DONE, detail, job_id=job_id)


def is_the_runs_own(job: JobRecord, run: Run, latest: Attempt | None) -> bool:
    """Whether the record under the run's job id is still the run's job: after a controller has lost its state, ids are used
    again. Ours carries the run's tag. Where somebody wrote over it, the same start has the same submission time, and a
    later one the same name."""
    if job.comment == run.tag or latest is None or latest.key.job_id != job.job_id:
        return True
    if (
        job.restart_count == latest.key.restart_count
        and latest.submitted_at is not None
        and job.submitted_at is not None
    ):
        return abs(job.submitted_at - latest.submitted_at) < SAME_SUBMIT_S
    if job.restart_count < latest.key.restart_count and None not in (job.submitted_at, latest.submitted_at):
        # A count that went back is the controller's loss, or another job's, submitted later.
        return (job.submitted_at or 0.0) < (latest.submitted_at or 0.0) + SAME_SUBMIT_S
    # An adopted job has whatever name it has.
    return run.config.job_log is not None or job.name in {"", run.config.slug}


# ------------------------------------------------------------------------------------------------------------- cancel


def _cancel(work: Work, history: History, clock: Clock) -> None:
    """Ask until the scheduler says that it is over. An unknown job is over."""
    job = _read(work, history)
    if job is None or job.state.is_ended:
        _advance(work, history, clock, ActionStage.DONE, "gone" if job is None else job.raw_state)
    elif not work.cancel_sent or job.state.is_queued:  # once a tick: one that was lost is sent again
        work.scheduler.cancel(work.action.job_id)
        work.cancel_sent = True
        _advance(work, history, clock, ActionStage.REQUESTED, "cancel sent")


_STEPS: dict[ActionKind, Callable[[Work, History, Clock], None]] = {
    ActionKind.REQUEUE: _requeue,
    ActionKind.RELEASE: _requeue,
    ActionKind.START: _requeue,
    ActionKind.RESUBMIT: _resubmit,
    ActionKind.CANCEL: _cancel,
}


# ------------------------------------------------------------------------------------------------------------- shared


def _without_looked(detail: str) -> str:
    return _joined(*(part for part in detail.split("; ") if part != LOOKED))


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _round(work: Work) -> Round:
    assert work.round is not None  # noqa: S101 - carry_out sets it
    return work.round


def _places(work: Work) -> Places:
    return _round(work).places_of(work)


def _read(work: Work, history: History) -> JobRecord | None:
    """None also where the id is another job's by now: nothing is ever done to that one."""
    job = _round(work).job(work)
    if job is None or is_the_runs_own(job, work.run, history.latest_attempt(work.run.run_id)):
        return job
    return None


def _still_ours(work: Work, history: History) -> None:
    """The last look before an effect: a person may have stopped the run, or another supervisor taken over."""
    if not history.holds(work.lease):
        raise LeaseLost(f"run {work.run.name}: stopped or taken over by another; nothing done")


def _advance(
    work: Work,
    history: History,
    clock: Clock,
    stage: ActionStage,
    detail: str,
    **changes: Any,
) -> None:
    """`changes`: as History.advance_action has them."""
    try:
        work.action = history.advance_action(work.lease, work.action, stage, detail=detail, now=clock.wall(), **changes)
    except LeaseLost:
        # A stop overtook us between the look and the effect: a requeue would bring the cancelled job back to life.
        if history.run(work.run.run_id).state is RunState.STOPPED:
            work.scheduler.cancel(changes.get("job_id") or work.action.job_id)
        raise


def _give_up(work: Work, history: History, clock: Clock, state: RunState, why: str) -> None:
    _advance(work, history, clock, ActionStage.FAILED, why, run_state=state)
