"""The steps of a requeue, against job records in the order in which Slurm 22.05.8 gave them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from krea_runner.errors import JobNotFound, RequeueDisabled, SchedulerError, SchedulerUnavailable
from krea_runner.history.exclusions import add_exclusions
from krea_runner.history.store import History, open_history
from krea_runner.model import (
    ActionKind,
    ActionStage,
    AttemptKey,
    Decision,
    DecisionKind,
    Finding,
    JobRecord,
    JobState,
    RunState,
    Symptom,
)
from krea_runner.rundir import RunDir
from krea_runner.schedulers import NodeRecord, Placement
from krea_runner.schedulers.nodelist import fold
from krea_runner.supervise.act import SLOW, SUBMIT_AGAIN_S, Work, carry_out

from .conftest import FakeClock, make_config

T0 = 1_800_000_000.0
RUNNING = JobRecord("7", JobState.RUNNING, "RUNNING", "None", 0, nodelist="n[1-4]")
COMPLETING = JobRecord("7", JobState.COMPLETING, "COMPLETING", "None", 1)
PENDING = JobRecord("7", JobState.PENDING, "PENDING", "BeginTime", 1, started_at=T0 + 121)
LIFTED = JobRecord("7", JobState.PENDING, "PENDING", "BeginTime", 1, started_at=T0 + 1)
WAITING = JobRecord("7", JobState.PENDING, "PENDING", "Resources", 1, started_at=T0 + 1)
AGAIN = JobRecord("7", JobState.RUNNING, "RUNNING", "None", 1, nodelist="n[1-4]")
REFUSED = JobRecord("7", JobState.FAILED, "FAILED", "NonZeroExitCode", 1, exit_code=1)
CANCELLED = JobRecord("7", JobState.CANCELLED, "CANCELLED", "None", 0)
COMPLETED = JobRecord("7", JobState.COMPLETED, "COMPLETED", "None", 0, exit_code=0)


class Replay:
    """A scheduler that says what it was recorded to say, one record a read (the last one for ever), and notes what is
    asked of it. `on` runs something in the middle of a call, or raises what the call answered."""

    name = "slurm"
    whole_second_starts = True

    def __init__(self, clock: FakeClock, records: Sequence[JobRecord | None]) -> None:
        self.clock, self.records, self.calls = clock, list(records), []
        self.on: dict[str, Callable[[], None]] = {}
        self.tagged: list[JobRecord] = []
        self.showed_pending = False

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        lifted = any(what.startswith("start_now") for what in self.asked)
        if lifted and self.records[0] is PENDING and self.showed_pending:
            self.records.pop(0)
        record = self.records[0]
        self.showed_pending = record is PENDING
        if len(self.records) > 1 and record is not PENDING:  # which it stays for 121 s, until its start time is lifted
            self.records.pop(0)
        return {} if record is None else {record.job_id: record}

    def _called(self, what: str) -> None:
        self.calls.append((what, self.clock.wall() - T0))
        self.on.pop(what, lambda: None)()

    def requeue(self, job_id: str) -> None:
        self._called("requeue")

    def start_now(self, job_id: str, excluded: Sequence[str] | None = None) -> None:
        self._called("start_now" if excluded is None else f"start_now off {fold(excluded)}")

    def placements(self, job_ids: Sequence[str]) -> dict[str, Placement]:
        return {} if self.records[0] is None else {job_id: Placement() for job_id in job_ids}

    def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
        return {name: NodeRecord(name, "IDLE") for name in ("n1", "n2", "n3", "n4", "n5")}

    def cancel(self, job_id: str) -> None:
        self._called("cancel")

    def release(self, job_id: str) -> None:
        self._called("release")

    def submit(self, script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
        self._called(f"submit off {fold(excluded)}" if excluded else "submit")
        return "8"

    def find_by_tag(self, tag: str) -> list[JobRecord]:
        return [job for job in self.tagged if job.comment == tag]

    @property
    def asked(self) -> list[str]:
        return [what for what, _ in self.calls]


@dataclasses.dataclass
class Bench:
    history: History
    clock: FakeClock
    run_id: int
    config_dir: Path

    def requeue_of(
        self,
        *records: JobRecord | None,
        stage: ActionStage = ActionStage.INTENDED,
        kind: ActionKind = ActionKind.REQUEUE,
        tag: str | None = None,
    ) -> tuple[Work, Replay]:
        """An action that is on record up to `stage`, and a scheduler that will say `records`."""
        run = self.history.run(self.run_id)
        now = self.clock.wall()
        lease = self.history.take_leases([self.run_id], "host:1:1", now=now, until=now + 100)[self.run_id]
        attempt = self.history.add_attempt(self.run_id, AttemptKey("7"), now=self.clock.wall())
        self.history.record_incident(
            lease, attempt, Finding(Symptom.CRASH, "rank_killed", "crash"), Decision(DecisionKind.REQUEUE, "why"),
            checkpoint_step=None, now=self.clock.wall(), action=(kind, 0),
        )  # fmt: skip
        action = self.history.open_action(self.run_id)
        assert action is not None
        if stage is not ActionStage.INTENDED:
            action = self.history.advance_action(lease, action, stage, detail="", now=self.clock.wall(), tag=tag)
            run = self.history.run(self.run_id)
        replay = Replay(self.clock, records)
        return Work(run, replay, lease, action), replay

    def script(self) -> None:
        self.config_dir.mkdir(parents=True, exist_ok=True)
        RunDir(self.config_dir).script.write_text("#!/bin/sh\n")

    def carry_out(self, work: Work) -> None:
        carry_out([work], self.history, self.clock, deadline=self.clock.mono() + 20)

    @property
    def state(self) -> RunState:
        return self.history.run(self.run_id).state


@pytest.fixture
def bench(tmp_path: Path, clock: FakeClock) -> Iterator[Bench]:
    history = open_history(tmp_path / "state")
    config = make_config(tmp_path, scheduler="slurm")
    run = history.create_run(config, user="alice", tag="t", now=clock.wall())
    history.set_submitted(run.run_id, "7", now=clock.wall())
    clock.now = T0 + 0.4
    return Bench(history, clock, run.run_id, config.run_dir)


def test_a_requeue_waits_for_pending_and_the_next_whole_second(bench: Bench) -> None:
    work, replay = bench.requeue_of(RUNNING, COMPLETING, COMPLETING, PENDING, LIFTED, AGAIN)
    bench.carry_out(work)
    assert replay.asked == ["requeue", "start_now"]
    assert replay.calls[1][1] == pytest.approx(1.15, abs=0.02)
    assert work.action.stage is ActionStage.DONE
    assert work.action.detail == "RUNNING on n[1-4]"


def test_a_tick_killed_after_the_requeue_does_not_requeue_again(bench: Bench) -> None:
    work, replay = bench.requeue_of(PENDING, LIFTED, AGAIN)
    bench.carry_out(work)
    assert replay.asked == ["start_now"]
    assert work.action.stage is ActionStage.DONE


def test_a_tick_killed_after_the_start_asks_for_nothing(bench: Bench) -> None:
    work, replay = bench.requeue_of(AGAIN, stage=ActionStage.REQUESTED)
    bench.carry_out(work)
    assert replay.asked == []
    assert work.action.stage is ActionStage.DONE


def test_a_job_that_waits_for_nodes_is_done_as_far_as_we_can(bench: Bench) -> None:
    work, replay = bench.requeue_of(WAITING, stage=ActionStage.STARTED)
    bench.carry_out(work)
    assert (replay.asked, work.action.detail) == ([], "queued: Resources")


def test_an_action_that_takes_longer_than_the_tick_stays_open(bench: Bench) -> None:
    work, replay = bench.requeue_of(RUNNING, COMPLETING)
    bench.carry_out(work)
    assert work.action.stage is ActionStage.REQUESTED
    assert bench.history.open_action(bench.run_id) == work.action
    assert replay.asked == ["requeue"]


def test_a_job_cancelled_meanwhile_is_not_brought_back(bench: Bench) -> None:
    work, replay = bench.requeue_of(CANCELLED)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage, bench.state) == ([], ActionStage.FAILED, RunState.STOPPED)


def test_a_job_completed_meanwhile_is_not_run_again(bench: Bench) -> None:
    work, replay = bench.requeue_of(COMPLETED)
    bench.carry_out(work)
    assert (replay.asked, bench.state) == ([], RunState.DONE)


@pytest.mark.parametrize("error", [None, RequeueDisabled("presently disabled"), JobNotFound("gone")])
def test_where_a_requeue_is_impossible_the_script_is_submitted_as_a_new_job(
    bench: Bench, error: SchedulerError | None
) -> None:
    ended = dataclasses.replace(RUNNING, state=JobState.FAILED, raw_state="FAILED")
    work, replay = bench.requeue_of(None) if error is None else bench.requeue_of(ended)
    if error is not None:
        replay.on["requeue"] = raiser(error)
    bench.script()
    bench.carry_out(work)
    assert replay.asked == ([] if error is None else ["requeue"]) + ["submit"]
    assert (work.action.kind, work.action.stage) == (ActionKind.RESUBMIT, ActionStage.DONE)
    run = bench.history.run(bench.run_id)
    assert (run.state, run.job_id, run.tag) == (RunState.ACTIVE, "8", f"t.{work.action.action_id}")


def test_a_refused_requeue_is_held_with_what_the_scheduler_said(bench: Bench) -> None:
    work, replay = bench.requeue_of(RUNNING)
    replay.on["requeue"] = raiser(SchedulerError("Access/permission denied"))
    bench.carry_out(work)
    assert bench.state is RunState.HELD
    assert "denied" in bench.history.run(bench.run_id).state_reason


def test_a_new_job_is_submitted_only_when_the_old_one_has_ended(bench: Bench) -> None:
    work, replay = bench.requeue_of(RUNNING, COMPLETING, CANCELLED, kind=ActionKind.RESUBMIT)
    bench.script()
    bench.carry_out(work)
    assert replay.asked == ["cancel", "submit"]
    assert bench.history.run(bench.run_id).job_id == "8"


def test_a_persons_cancel_before_the_new_submission_is_final(bench: Bench) -> None:
    work, replay = bench.requeue_of(CANCELLED, kind=ActionKind.RESUBMIT)
    bench.script()
    bench.carry_out(work)
    assert (replay.asked, bench.state) == ([], RunState.STOPPED)


def test_an_id_that_is_another_jobs_by_now_is_not_cancelled(bench: Bench) -> None:
    other = dataclasses.replace(RUNNING, comment="another's", submitted_at=T0 + 50)
    work, replay = bench.requeue_of(other, kind=ActionKind.RESUBMIT)
    attempt = bench.history.latest_attempt(bench.run_id)
    bench.history.save_observations((dataclasses.replace(attempt, submitted_at=T0), None))
    bench.script()
    bench.carry_out(work)
    assert replay.asked == ["submit"]


def test_a_new_submission_whose_answer_was_lost_is_looked_for_not_repeated(bench: Bench) -> None:
    work, replay = bench.requeue_of(None, kind=ActionKind.RESUBMIT)
    bench.script()
    replay.on["submit"] = raiser(SchedulerUnavailable("no answer"))
    with pytest.raises(SchedulerUnavailable):
        bench.carry_out(work)
    assert bench.history.run(bench.run_id).job_id == "7"
    replay.tagged = [dataclasses.replace(RUNNING, job_id="8", comment=f"t.{work.action.action_id}")]
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == (["submit"], ActionStage.DONE)
    assert bench.history.run(bench.run_id).job_id == "8"


def test_a_new_submission_that_never_arrived_is_repeated_after_a_while(bench: Bench) -> None:
    work, replay = bench.requeue_of(None, kind=ActionKind.RESUBMIT, stage=ActionStage.REQUESTED, tag="t.1")
    bench.script()
    bench.carry_out(work)
    assert (replay.asked, work.action.stage, work.parked) == ([], ActionStage.REQUESTED, True)
    bench.clock.sleep(SUBMIT_AGAIN_S + 1)
    work.parked = False
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == (["submit"], ActionStage.DONE)


def test_without_a_script_of_ours_a_person_must_submit(bench: Bench) -> None:
    work, replay = bench.requeue_of(None)
    bench.carry_out(work)
    assert (replay.asked, bench.state) == ([], RunState.HELD)


HELD = dataclasses.replace(PENDING, reason="launch failed requeued held")


def test_a_hold_that_slurm_put_on_the_job_is_released_and_the_start_brought_forward(bench: Bench) -> None:
    work, replay = bench.requeue_of(HELD, PENDING, LIFTED, AGAIN, kind=ActionKind.RELEASE)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == (["release", "start_now"], ActionStage.DONE)


def test_a_persons_hold_that_took_its_place_stays(bench: Bench) -> None:
    held = dataclasses.replace(PENDING, reason="JobHeldUser", started_at=None)
    work, replay = bench.requeue_of(held, kind=ActionKind.RELEASE)
    bench.carry_out(work)
    assert "release" not in replay.asked


def test_of_a_job_that_slurm_requeued_only_the_wait_is_lifted(bench: Bench) -> None:
    work, replay = bench.requeue_of(COMPLETING, PENDING, LIFTED, AGAIN, kind=ActionKind.START)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == (["start_now"], ActionStage.DONE)


def test_a_controller_that_goes_away_leaves_the_intent_for_the_next_tick(bench: Bench) -> None:
    work, replay = bench.requeue_of(RUNNING, RUNNING, COMPLETING, PENDING, LIFTED, AGAIN)
    replay.on["requeue"] = raiser(SchedulerUnavailable("no answer"))
    with pytest.raises(SchedulerUnavailable):
        bench.carry_out(work)
    assert work.action.stage is ActionStage.INTENDED
    assert bench.state is RunState.ACTIVE
    bench.carry_out(work)
    assert replay.asked == ["requeue", "requeue", "start_now"]
    assert work.action.stage is ActionStage.DONE


def test_a_start_that_was_lost_is_asked_for_again(bench: Bench) -> None:
    work, replay = bench.requeue_of(PENDING, LIFTED, AGAIN, stage=ActionStage.STARTED)
    bench.carry_out(work)
    assert replay.asked == ["start_now"]
    assert work.action.stage is ActionStage.DONE


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_clock_that_is_off_by_minutes_neither_repeats_a_start_nor_hides_that_it_was_lost(
    bench: Bench, minutes: int
) -> None:
    bench.clock.now += 60 * minutes
    work, replay = bench.requeue_of(RUNNING, COMPLETING, PENDING, LIFTED, LIFTED, AGAIN)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == (["requeue", "start_now"], ActionStage.DONE)


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_lost_start_is_noticed_by_slurms_clock_alone(bench: Bench, minutes: int) -> None:
    bench.clock.now += 60 * minutes
    still = dataclasses.replace(PENDING)
    work, replay = bench.requeue_of(PENDING, still, LIFTED, AGAIN)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == (["start_now", "start_now"], ActionStage.DONE)


def test_a_start_refused_by_a_revoked_credential_is_requeued_with_slurms_own_delay(bench: Bench) -> None:
    second = dataclasses.replace(PENDING, restart_count=2)
    work, replay = bench.requeue_of(REFUSED, REFUSED, second, stage=ActionStage.STARTED)
    bench.carry_out(work)
    assert replay.asked == ["requeue"]
    assert (work.action.stage, work.action.detail) == (ActionStage.DONE, f"{SLOW}; queued: BeginTime")


def test_a_start_that_crashed_by_itself_is_the_next_incident_not_a_refused_start(bench: Bench) -> None:
    began = RunDir(bench.config_dir).script_events(AttemptKey("7", 1))
    began.parent.mkdir(parents=True)
    began.write_text('{"event":"attempt_start"}\n')
    work, replay = bench.requeue_of(REFUSED, stage=ActionStage.STARTED)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == ([], ActionStage.DONE)


def test_a_start_whose_output_could_not_be_opened_is_not_a_refused_one(bench: Bench) -> None:
    unwritable = dataclasses.replace(REFUSED, exit_code=15, signal=53)
    work, replay = bench.requeue_of(unwritable, stage=ActionStage.STARTED)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage) == ([], ActionStage.DONE)


def test_a_stop_before_the_requeue_prevents_it(bench: Bench) -> None:
    work, replay = bench.requeue_of(RUNNING)
    bench.history.stop_run(work.run, reason="enough", by="alice", now=bench.clock.wall())
    bench.carry_out(work)
    assert replay.asked == []
    assert "stopped or taken over" in work.trouble


def test_a_stop_during_the_requeue_cancels_the_job_that_came_back(bench: Bench) -> None:
    work, replay = bench.requeue_of(RUNNING)
    replay.on["requeue"] = lambda: bench.history.stop_run(work.run, reason="enough", by="alice", now=bench.clock.wall())
    bench.carry_out(work)
    assert replay.asked == ["requeue", "cancel"]
    assert bench.state is RunState.STOPPED


def raiser(error: Exception) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def test_a_state_that_nobody_knows_is_waited_out(bench: Bench) -> None:
    strange = dataclasses.replace(RUNNING, state=JobState.UNKNOWN, raw_state="PONDERING")
    work, replay = bench.requeue_of(strange)
    bench.carry_out(work)
    assert (replay.asked, work.action.stage, bench.state) == ([], ActionStage.INTENDED, RunState.ACTIVE)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.RUNNING])
def test_a_requeue_that_the_controller_forgot_is_asked_for_again(bench: Bench, state: JobState) -> None:
    forgotten = dataclasses.replace(RUNNING, state=state, raw_state=str(state))
    work, replay = bench.requeue_of(
        forgotten, forgotten, COMPLETING, PENDING, LIFTED, AGAIN, stage=ActionStage.REQUESTED
    )
    bench.carry_out(work)
    assert replay.asked == ["requeue", "start_now"]
    assert work.action.stage is ActionStage.DONE


def exclude_n1(bench: Bench) -> None:
    shared = {"user": "alice", "reason": "why", "who": "alice", "now": 1.0}
    add_exclusions(bench.history, ["n1"], run_id=bench.run_id, expires_at=None, **shared)


# As scontrol and sbatch 22.05.8 say it.
INVALID = SchedulerError("scontrol update: Invalid node name specified for job 7")


def test_a_start_says_which_nodes_it_is_kept_off(bench: Bench) -> None:
    exclude_n1(bench)
    work, replay = bench.requeue_of(PENDING, LIFTED, AGAIN, stage=ActionStage.REQUESTED)
    bench.carry_out(work)
    assert replay.asked == ["start_now off n1"]
    assert work.action.detail == "off n1; RUNNING on n[1-4]"


def test_a_start_whose_exclusions_are_refused_comes_first_and_says_so(bench: Bench) -> None:
    exclude_n1(bench)
    work, replay = bench.requeue_of(PENDING, LIFTED, AGAIN, stage=ActionStage.REQUESTED)
    replay.on["start_now off n1"] = raiser(INVALID)
    bench.carry_out(work)
    assert replay.asked == ["start_now off n1", "start_now"]
    assert work.action.detail.startswith("NOT kept off n1: scontrol update: Invalid node name")


def test_a_new_job_is_kept_off_the_same_nodes_though_the_old_one_is_forgotten(bench: Bench) -> None:
    exclude_n1(bench)
    bench.script()
    work, replay = bench.requeue_of(None, kind=ActionKind.RESUBMIT)
    bench.carry_out(work)
    assert (replay.asked, work.action.detail) == (["submit off n1"], "job 8; off n1")


def test_a_new_job_whose_exclusions_are_refused_is_submitted_without_and_says_so(bench: Bench) -> None:
    exclude_n1(bench)
    bench.script()
    work, replay = bench.requeue_of(None, kind=ActionKind.RESUBMIT)
    replay.on["submit off n1"] = raiser(INVALID)
    bench.carry_out(work)
    assert replay.asked == ["submit off n1", "submit"]
    assert "job 8; NOT kept off n1" in work.action.detail


def test_a_new_job_with_exclusions_of_which_no_answer_came_is_not_submitted_again_at_once(bench: Bench) -> None:
    exclude_n1(bench)
    bench.script()
    work, replay = bench.requeue_of(None, kind=ActionKind.RESUBMIT)
    replay.on["submit off n1"] = raiser(SchedulerUnavailable("no answer"))
    with pytest.raises(SchedulerUnavailable):
        bench.carry_out(work)
    assert (replay.asked, work.action.stage) == (["submit off n1"], ActionStage.REQUESTED)
