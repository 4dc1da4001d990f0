"""Carries out one action, a step at a time. What was done is committed before the next step, so that a tick killed
anywhere is finished by the next one; what was asked for is verified by reading the scheduler again.

The requeue dance (Slurm 22.05 to 26.05; measured, docs/design/requeue.md): `requeue`, wait until the job reads PENDING,
wait for the next whole second, lift the start time. Slurm's own delay of 121 s is only the fallback.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from krea_runner.clock import Clock
from krea_runner.errors import JobNotFound, SchedulerError
from krea_runner.history.store import History, Lease, LeaseLost
from krea_runner.model import Action, ActionKind, ActionStage, AttemptKey, JobRecord, JobState, Run, RunState
from krea_runner.rundir import RunDir
from krea_runner.schedulers import Scheduler
from krea_runner.transport.mirror import mirrored

# A start in the same whole second as the kill is refused; this much past the next one was always accepted (102 of 102).
SECOND_MARGIN_S = 0.15
# StartTime further ahead than this was set by the requeue itself and not lifted yet.
LIFTED_S = 5.0
POLL_S = 0.1
# What Slurm still says of a job whose start time was just lifted; any other reason (Resources, Priority, ...) means that
# our part is done and the queue decides.
_ABOUT_TO_START = frozenset({"", "None", "BeginTime"})
SLOW = "start refused by a revoked credential; requeued again, with Slurm's own delay"


@dataclass(slots=True)
class Work:
    """One open action and what is needed to carry it on. `lift_at`: when the start time may be lifted (wall clock)."""

    run: Run
    scheduler: Scheduler
    lease: Lease
    action: Action
    lift_at: float | None = None


def carry_out(work: list[Work], history: History, clock: Clock, *, deadline: float) -> None:
    """Advance all actions side by side until each is closed or `deadline` (monotonic) has passed; what is left open
    is the next tick's.

    Raises: SchedulerUnavailable (the action stays open), LeaseLost, HistoryError.
    """
    while True:
        for item in work:
            if item.action.stage.is_open:
                _STEPS[item.action.kind](item, history, clock)
        if not any(item.action.stage.is_open for item in work) or clock.mono() >= deadline:
            return
        due = (item.lift_at - clock.wall() for item in work if item.lift_at is not None)
        clock.sleep(min([POLL_S, *(wait for wait in due if wait > 0)]))


# ------------------------------------------------------------------------------------------------------------ requeue


def _requeue(work: Work, history: History, clock: Clock) -> None:
    job = _read(work)
    if job is None:
        _give_up(
            work,
            history,
            clock,
            RunState.HELD,
            f"job {work.action.job_id} is not known to the scheduler any more",
        )
    elif job.state is JobState.CANCELLED:
        _give_up(work, history, clock, RunState.STOPPED, "cancelled from outside (scancel) before the requeue")
    elif job.state is not JobState.UNKNOWN:  # nothing is done about what nobody understands; the next read may
        _REQUEUE_STEPS[work.action.stage](work, job, history, clock)


def _ask_for_requeue(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    action = work.action
    if job.state is JobState.COMPLETED:
        _give_up(work, history, clock, RunState.DONE, "completed before the requeue")
        return
    if job.restart_count <= action.restart_count and not job.state.is_queued:
        _still_ours(work, history)
        try:
            work.scheduler.requeue(action.job_id)
        except JobNotFound as error:
            _give_up(work, history, clock, RunState.HELD, str(error))
            return
        except SchedulerError as error:
            if error.transient:
                raise
            _give_up(work, history, clock, RunState.HELD, f"requeue refused: {error}")
            return
    _advance(work, history, clock, ActionStage.REQUESTED, work.action.detail)


def _lift_start_time(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    if job.state is JobState.COMPLETING:
        return  # the old attempt is still ending
    if job.state.is_live or job.state.is_ended:
        # At the old count the request is lost: a controller killed within seconds of a change forgets it (22.05.8).
        taken = job.restart_count > work.action.restart_count
        _advance(work, history, clock, ActionStage.STARTED if taken else ActionStage.INTENDED, work.action.detail)
        return
    if not job.state.is_queued:
        return
    if work.action.detail != SLOW:
        if work.lift_at is None:
            now = clock.wall()
            work.lift_at = math.floor(now) + 1 + SECOND_MARGIN_S if work.scheduler.whole_second_starts else now
        if clock.wall() < work.lift_at:
            return
        _still_ours(work, history)
        work.scheduler.start_now(work.action.job_id)
    _advance(work, history, clock, ActionStage.STARTED, work.action.detail)


def _verify_start(work: Work, job: JobRecord, history: History, clock: Clock) -> None:
    action = work.action
    if job.state is JobState.FAILED and _start_was_refused(work, job):
        work.lift_at = None
        _advance(work, history, clock, ActionStage.INTENDED, SLOW, restart_count=job.restart_count)
    elif job.state.is_queued:
        waits = job.started_at is not None and job.started_at > clock.wall() + LIFTED_S
        if waits and action.detail != SLOW:
            work.scheduler.start_now(action.job_id)  # the update came while the job was still COMPLETING, and was lost
        elif job.reason not in _ABOUT_TO_START or action.detail == SLOW:
            _advance(work, history, clock, ActionStage.DONE, action.detail or f"queued: {job.reason}")
    elif job.state is not JobState.COMPLETING:
        _advance(
            work,
            history,
            clock,
            ActionStage.DONE,
            action.detail or f"{job.raw_state} on {job.nodelist or '-'}",
        )


_REQUEUE_STEPS: dict[ActionStage, Callable[[Work, JobRecord, History, Clock], None]] = {
    ActionStage.INTENDED: _ask_for_requeue,
    ActionStage.REQUESTED: _lift_start_time,
    ActionStage.STARTED: _verify_start,
}


def _start_was_refused(work: Work, job: JobRecord) -> bool:
    """FAILED 1:0 without the script having said a word (22.05.8: "Killing non-startable batch JobId")."""
    attempt = AttemptKey(job.job_id, job.restart_count)
    never_began = not RunDir(mirrored(work.run.config, attempt).run_dir).script_events(attempt).exists()
    return job.restart_count > work.action.restart_count and never_began


# ------------------------------------------------------------------------------------------------------------- cancel


def _cancel(work: Work, history: History, clock: Clock) -> None:
    """Ask until the scheduler says that it is over. An unknown job is over."""
    job = _read(work)
    if job is None or job.state.is_ended:
        _advance(work, history, clock, ActionStage.DONE, "gone" if job is None else job.raw_state)
    elif work.action.stage is ActionStage.INTENDED or job.state.is_queued:
        work.scheduler.cancel(work.action.job_id)
        _advance(work, history, clock, ActionStage.REQUESTED, "cancel sent")


_STEPS: dict[ActionKind, Callable[[Work, History, Clock], None]] = {
    ActionKind.REQUEUE: _requeue,
    ActionKind.CANCEL: _cancel,
}


# ------------------------------------------------------------------------------------------------------------- shared


def _read(work: Work) -> JobRecord | None:
    return work.scheduler.jobs([work.action.job_id]).get(work.action.job_id)


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
    *,
    restart_count: int | None = None,
) -> None:
    try:
        work.action = history.advance_action(
            work.lease, work.action, stage, detail=detail, now=clock.wall(), restart_count=restart_count
        )
    except LeaseLost:
        # A stop overtook us between the look and the effect: a requeue would bring the cancelled job back to life.
        if history.run(work.run.run_id).state is RunState.STOPPED:
            work.scheduler.cancel(work.action.job_id)
        raise


def _give_up(work: Work, history: History, clock: Clock, state: RunState, why: str) -> None:
    _advance(work, history, clock, ActionStage.FAILED, why)
    history.set_run_state(work.run.run_id, state, why, now=clock.wall())
