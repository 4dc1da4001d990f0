"""One tick after another over one run, against job records as Slurm 22.05.8 gives them."""

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from krea_runner import heartbeat
from krea_runner.errors import SchedulerUnavailable
from krea_runner.history.store import History, open_history
from krea_runner.history.ticks import last_ticks
from krea_runner.model import AttemptKey, DecisionKind, JobRecord, JobState, Policy, RunState, Symptom
from krea_runner.rundir import RunDir
from krea_runner.schedulers import NodeRecord
from krea_runner.supervise.supervisor import Supervisor, TickReport
from krea_runner.supervise.tick import look, tick

from .conftest import FakeClock, make_config

RUNNING = JobRecord(
    "7", JobState.RUNNING, "RUNNING", "None", 0, started_at=1_800_000_000.0, nodelist="n[1-2]", requeue_allowed=True
)
PENDING = JobRecord("7", JobState.PENDING, "PENDING", "Priority", 0)


def ended(state: JobState, **more) -> JobRecord:
    return dataclasses.replace(RUNNING, state=state, raw_state=str(state), ended_at=1_800_000_100.0, **more)


class Says:
    """A scheduler that says one record until told otherwise; a requeue makes it say PENDING, then RUNNING."""

    name, whole_second_starts = "slurm", True

    def __init__(self) -> None:
        self.record: JobRecord | None = RUNNING
        self.error: SchedulerUnavailable | None = None
        self.asked: list[str] = []
        self.tagged: list[JobRecord] = []
        self.accounting: list[JobRecord] = []
        self.node_records: list[NodeRecord] = []

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        if self.error is not None:
            raise self.error
        return {} if self.record is None else {self.record.job_id: self.record}

    def my_jobs(self, known: Sequence[str]) -> dict[str, JobRecord]:
        return self.jobs(known) | {job.job_id: job for job in self.tagged}

    def find_by_tag(self, tag: str) -> list[JobRecord]:
        return [job for job in self.my_jobs([]).values() if job.comment == tag]

    def starts(self, job_ids: Sequence[str]) -> dict[str, list[JobRecord]]:
        return dict.fromkeys(job_ids, self.accounting)

    def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
        return {node.name: node for node in self.node_records}

    def submit(self, script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
        self.asked.append(f"submit {tag}")
        self.record = dataclasses.replace(RUNNING, job_id="8", comment=tag)
        return "8"

    def release(self, job_id: str) -> None:
        self.asked.append("release")
        self.record = dataclasses.replace(self.record, state=JobState.PENDING, raw_state="PENDING", reason="BeginTime")

    def requeue(self, job_id: str) -> None:
        self.asked.append("requeue")
        self.record = JobRecord(
            "7", JobState.PENDING, "PENDING", "BeginTime", self.record.restart_count + 1, started_at=2e9
        )

    def start_now(self, job_id: str) -> None:
        self.asked.append("start_now")
        self.record = dataclasses.replace(RUNNING, restart_count=self.record.restart_count)

    def run_beside(self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float, user: str = ""):
        raise SchedulerUnavailable("the nodes are not asked here")

    def end_beside(self, job_id: str) -> None:
        pass

    def cancel(self, job_id: str) -> None:
        self.asked.append("cancel")
        self.record = ended(JobState.CANCELLED)


@dataclasses.dataclass
class Desk:
    history: History
    clock: FakeClock
    says: Says
    run_id: int
    run_dir: RunDir
    dry_run: bool = False
    holder: str = "login1:1:1"

    def supervisor(self) -> Supervisor:
        return Supervisor(self.history, lambda _: self.says, self.clock, "alice", self.holder, dry_run=self.dry_run)

    def tick(self, record: JobRecord | str | None = "same") -> TickReport:
        if record != "same":
            self.says.record = record
        self.clock.sleep(10.0)
        return tick(self.supervisor())

    def beat(self, step: int, *, flush: int, restart: int = 0, stopped: tuple[int, ...] = ()) -> None:
        """Four ranks' slots as heartbeat.py writes them; the `stopped` ones are left as they were."""
        attempt = AttemptKey("7", restart)
        folder = self.run_dir.heartbeats(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(4):
            if rank in stopped:
                continue
            path = folder / f"n{rank // 2 + 1}.hb"
            body = (
                f"{heartbeat.FORMAT} rank={rank} local={rank % 2} attempt={attempt} beat={step} flush={flush} step={step} "
                f"phase=step budget=- pid=1 at=1.000"
            )
            padded = body.ljust(heartbeat.SLOT - 14).encode()
            content = bytearray(path.read_bytes() if path.exists() else b"\0" * 2 * heartbeat.SLOT)
            start = rank % 2 * heartbeat.SLOT
            content[start : start + heartbeat.SLOT] = padded + b" crc=%08x\n" % zlib.crc32(padded)
            path.write_bytes(content)

    @property
    def state(self) -> RunState:
        return self.history.run(self.run_id).state

    def incident(self):
        (incident,) = self.history.incidents(run_id=self.run_id)
        return incident


@pytest.fixture
def desk(tmp_path: Path, clock: FakeClock) -> Desk:
    history = open_history(tmp_path / "state")
    config = make_config(tmp_path, scheduler="slurm")
    config.run_dir.mkdir()
    run = history.create_run(config, user="alice", tag="t", now=clock.wall())
    history.set_submitted(run.run_id, "7", now=clock.wall())
    return Desk(history, clock, Says(), run.run_id, RunDir(config.run_dir))


def test_a_hang_is_on_record_before_the_requeue_and_the_recovery_after_it(desk: Desk) -> None:
    desk.beat(70, flush=1)
    desk.tick()
    saved = desk.run_dir.root.parent / "ckpt" / "step_60"
    saved.mkdir(parents=True)
    (saved / "COMPLETE").touch()
    desk.beat(70, flush=11, stopped=(2,))
    report = desk.tick()
    assert desk.says.asked == ["requeue", "start_now"]
    incident = desk.incident()
    assert (incident.finding.symptom, incident.finding.cause, incident.finding.node) == (
        Symptom.HANG,
        "rank_stopped",
        "n2",
    )
    assert (incident.decision.kind, incident.lost_steps, incident.restarted_at) == (DecisionKind.REQUEUE, 10, None)
    assert [line.news for line in report.lines] == [True, True]
    evidence = json.loads((desk.run_dir.incident(AttemptKey("7")) / "evidence.json").read_text())
    assert evidence["finding"]["cause"] == "rank_stopped"
    desk.tick()
    assert desk.incident().restarted_at is not None
    assert desk.incident().resumed_at is None
    desk.beat(61, flush=1, restart=1)
    desk.tick()
    assert desk.incident().resumed_step == 61
    assert [attempt.end_state for attempt in desk.history.attempts(desk.run_id)] == [JobState.REQUEUED, None]


def test_a_crash_is_requeued_once_however_many_ticks(desk: Desk) -> None:
    desk.tick(ended(JobState.FAILED, exit_code=137))
    for _ in range(5):
        desk.tick()
    assert desk.says.asked == ["requeue", "start_now"]
    assert len(desk.history.incidents()) == 1


def test_a_cancel_is_a_stop_for_ever(desk: Desk) -> None:
    desk.tick(ended(JobState.CANCELLED))
    for _ in range(10):
        assert desk.tick().lines == []
    assert (desk.says.asked, desk.state) == ([], RunState.STOPPED)
    assert desk.incident().decision.kind is DecisionKind.STOP


def test_a_completed_job_is_done_and_no_incident(desk: Desk) -> None:
    desk.tick(ended(JobState.COMPLETED, exit_code=0))
    assert (desk.state, desk.history.incidents()) == (RunState.DONE, [])


def test_a_controller_that_does_not_answer_is_nothing_but_blindness(desk: Desk) -> None:
    desk.tick()
    desk.says.error = SchedulerUnavailable("squeue: no answer")
    report = desk.tick()
    assert report.blind == "llm: could not see: squeue: no answer"
    assert (desk.state, desk.history.incidents()) == (RunState.ACTIVE, [])
    assert last_ticks(desk.history)[0].blind == report.blind
    desk.says.error = None
    assert desk.tick().blind == ""


@pytest.mark.parametrize("record", [None, dataclasses.replace(RUNNING, state=JobState.UNKNOWN, raw_state="PONDERING")])
def test_an_absent_job_and_a_strange_state_are_not_an_end(desk: Desk, record: JobRecord | None) -> None:
    desk.tick()
    report = desk.tick(record)
    assert report.blind
    assert (desk.says.asked, desk.state, desk.history.incidents()) == ([], RunState.ACTIVE, [])


def test_an_absent_job_whose_script_ended_well_is_done(desk: Desk) -> None:
    desk.tick()
    desk.run_dir.events.mkdir()
    desk.run_dir.script_events(AttemptKey("7")).write_text('{"event":"attempt_end","exit_code":0,"at":1}\n')
    desk.tick(None)
    assert desk.state is RunState.DONE


def test_a_job_that_slurm_requeued_itself_is_adopted_not_requeued_again(desk: Desk) -> None:
    desk.tick()
    desk.tick(dataclasses.replace(PENDING, restart_count=1, reason="BeginTime"))
    desk.tick(dataclasses.replace(RUNNING, restart_count=1))
    assert desk.says.asked == []
    incident = desk.incident()
    assert (incident.finding.symptom, incident.decision.kind) == (Symptom.REQUEUED_ELSEWHERE, DecisionKind.WAIT)
    assert [attempt.key.restart_count for attempt in desk.history.attempts(desk.run_id)] == [0, 1]


def test_while_the_job_waits_or_is_suspended_no_clock_runs(desk: Desk) -> None:
    desk.beat(70, flush=1)
    desk.tick()
    for state in (JobState.SUSPENDED, JobState.SUSPENDED):
        desk.clock.sleep(1000)
        desk.tick(dataclasses.replace(RUNNING, state=state))
    desk.tick(RUNNING)
    assert (desk.says.asked, desk.history.incidents()) == ([], [])


def test_observe_mode_records_and_does_nothing(desk: Desk, tmp_path: Path) -> None:
    config = make_config(tmp_path, scheduler="slurm", run_dir=tmp_path / "other", policy=Policy(mode="observe"))
    run = desk.history.create_run(config, user="alice", tag="t2", now=desk.clock.wall())
    desk.history.set_run_state(desk.run_id, RunState.DONE, "", now=0)
    desk.history.set_submitted(run.run_id, "7", now=desk.clock.wall())
    for _ in range(3):
        desk.tick(ended(JobState.FAILED, exit_code=1))
    assert desk.says.asked == []
    (incident,) = desk.history.incidents(run_id=run.run_id)
    assert incident.decision.reason.startswith("observe mode: would REQUEUE")


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(desk: Desk) -> None:
    desk.dry_run = True
    report = desk.tick(ended(JobState.FAILED, exit_code=1))
    assert "→ REQUEUE" in report.lines[0].text
    assert (desk.says.asked, desk.history.incidents(), desk.history.attempts(desk.run_id)) == ([], [], [])
    assert (last_ticks(desk.history), desk.history.lease_holder(desk.run_id)) == ([], None)


def test_a_run_under_another_living_supervisors_lease_is_left_to_it(desk: Desk) -> None:
    desk.history.take_leases([desk.run_id], "login2:5:5", now=desk.clock.wall(), until=desk.clock.wall() + 100)
    report = desk.tick(ended(JobState.FAILED, exit_code=1))
    assert "left to login2" in report.lines[0].text
    assert (desk.says.asked, desk.history.incidents()) == ([], [])
    desk.clock.sleep(100)
    desk.tick()
    assert desk.says.asked == ["requeue", "start_now"]


def test_the_lease_is_free_after_each_tick(desk: Desk) -> None:
    desk.tick()
    assert desk.history.lease_holder(desk.run_id) is None


def test_a_lost_submission_is_found_by_its_tag(desk: Desk, tmp_path: Path) -> None:
    desk.history.set_run_state(desk.run_id, RunState.SUBMITTING, "", now=0)
    desk.history._update_run(desk.run_id, job_id=None)
    assert "looking for its tag" in desk.tick(None).blind
    desk.says.tagged = [dataclasses.replace(RUNNING, comment="t")]
    desk.tick()
    assert (desk.state, desk.history.run(desk.run_id).job_id) == (RunState.ACTIVE, "7")


def test_a_held_run_resumes_when_a_person_says_so(desk: Desk) -> None:
    desk.tick(ended(JobState.FAILED, exit_code=93))
    assert (desk.state, desk.says.asked) == (RunState.HELD, [])
    assert desk.tick().lines == []
    desk.history.resume_run(desk.history.run(desk.run_id), reason="try", by="alice", now=desk.clock.wall())
    desk.tick()
    assert (desk.state, desk.says.asked) == (RunState.ACTIVE, ["requeue", "start_now"])
    desk.tick()
    assert len(desk.history.incidents()) == 1


def test_a_look_between_ticks_sees_the_hang_the_first_step_and_the_scripts_end(desk: Desk) -> None:
    supervisor = desk.supervisor()
    report = tick(supervisor)
    assert not look(supervisor, report)
    desk.beat(1, flush=1)
    assert look(supervisor, report)  # the first step
    report = tick(supervisor)
    assert not look(supervisor, report)
    for flush in range(2, 13):
        desk.clock.sleep(1.0)
        desk.beat(1, flush=flush, stopped=(3,))
        seen = look(supervisor, report)
    assert seen  # the hang: eleven seconds against a budget of ten
    desk.run_dir.events.mkdir()
    desk.run_dir.script_events(AttemptKey("7")).write_text('{"event":"attempt_end","exit_code":1,"at":1}\n')
    desk.beat(2, flush=20)
    assert look(supervisor, report)


def test_an_outdated_answer_is_not_a_new_requeue(desk: Desk) -> None:
    desk.tick()
    desk.tick(dataclasses.replace(RUNNING, restart_count=1))
    (incident,) = desk.history.incidents()
    report = desk.tick(RUNNING)
    assert "restart 0 when 1 is on record" in report.blind
    assert desk.history.incidents() == [incident]


def test_the_scheduler_is_asked_under_the_lease(desk: Desk) -> None:
    seen: list[str | None] = []
    asked = desk.says.jobs
    desk.says.jobs = lambda job_ids: (seen.append(desk.history.lease_holder(desk.run_id)), asked(job_ids))[1]
    desk.tick()
    assert seen == [desk.holder]


# --------------------------------------------------------------------------------------- starts that end out of our sight


def came_back(**more) -> JobRecord:
    return dataclasses.replace(PENDING, restart_count=1, reason="BeginTime", started_at=2e9, **more)


def test_a_node_failure_that_slurm_requeued_is_recorded_and_only_its_wait_is_lifted(desk: Desk) -> None:
    desk.tick()
    desk.says.accounting = [JobRecord("7", JobState.NODE_FAIL, "NODE_FAIL", nodelist="n[1-2]")]
    desk.tick(came_back())
    assert desk.says.asked == ["start_now"]
    incident = desk.incident()
    assert (incident.finding.symptom, incident.decision.kind) == (Symptom.NODE_FAIL, DecisionKind.WAIT)
    first = desk.history.attempts(desk.run_id)[0]
    assert (first.end_state, first.ended_by) == (JobState.NODE_FAIL, "slurm")


def test_the_node_that_failed_is_the_one_that_is_down_where_the_log_does_not_name_it(desk: Desk) -> None:
    desk.tick()
    desk.says.accounting = [JobRecord("7", JobState.NODE_FAIL, "NODE_FAIL", nodelist="n[1-2]")]
    desk.says.node_records = [NodeRecord("n1", "IDLE"), NodeRecord("n2", "DOWN*"), NodeRecord("n3", "DOWN")]
    desk.tick(came_back())
    assert desk.incident().finding.node == "n2"


def test_starts_that_came_and_went_between_two_ticks_are_all_on_record(desk: Desk) -> None:
    desk.tick()
    desk.tick(dataclasses.replace(RUNNING, restart_count=3))
    assert [str(incident.attempt) for incident in desk.history.incidents()] == ["7.r0", "7.r1", "7.r2"]
    assert [attempt.key.restart_count for attempt in desk.history.attempts(desk.run_id)] == [0, 1, 2, 3]
    desk.tick()
    assert (len(desk.history.incidents()), desk.says.asked) == (3, [])


def test_a_job_that_slurm_holds_after_a_failed_launch_is_released(desk: Desk) -> None:
    held = dataclasses.replace(came_back(), reason="launch failed requeued held", comment="t")
    desk.tick(held)  # never seen before: its first start failed within a second
    assert desk.says.asked == ["release", "start_now"]
    assert desk.incident().finding.cause == "launch_failed"


def test_a_job_that_slurm_has_forgotten_is_submitted_again_once_its_ranks_are_silent(desk: Desk) -> None:
    desk.run_dir.script.write_text("#!/bin/sh\n")
    desk.beat(70, flush=1)
    desk.tick()
    for step in range(71, 75):
        desk.beat(step, flush=step)
        assert "not known" in desk.tick(None).blind
    for _ in range(8):
        desk.tick(None)
        if desk.says.asked:
            break
    (submitted,) = desk.says.asked
    run = desk.history.run(desk.run_id)
    assert submitted == f"submit {run.tag}"
    assert (run.job_id, run.state, desk.incident().decision.kind) == ("8", RunState.ACTIVE, DecisionKind.RESUBMIT)
    desk.tick()
    assert [str(attempt.key) for attempt in desk.history.attempts(desk.run_id)] == ["7.r0", "8.r0"]
    assert len(desk.history.incidents()) == 1


def test_an_id_that_was_given_to_another_job_is_not_taken_for_ours(desk: Desk) -> None:
    desk.run_dir.script.write_text("#!/bin/sh\n")
    desk.tick(dataclasses.replace(RUNNING, submitted_at=1_800_000_000.0, comment="t"))
    other = dataclasses.replace(ended(JobState.CANCELLED), submitted_at=1_800_050_000.0, comment="another's")
    assert "not known" in desk.tick(other).blind
    assert desk.state is RunState.ACTIVE


def test_a_second_job_of_a_run_is_cancelled(desk: Desk) -> None:
    tag = "krea_runner/abc"
    desk.history._update_run(desk.run_id, tag=f"{tag}.2")
    desk.says.tagged = [dataclasses.replace(PENDING, job_id="6", comment=tag)]
    desk.says.cancel = lambda job_id: desk.says.asked.append(f"cancel {job_id}")
    report = desk.tick(dataclasses.replace(RUNNING, comment=f"{tag}.2"))
    assert desk.says.asked == ["cancel 6"]
    assert any("job 6 is not the job of this run" in line.text for line in report.lines)


def test_a_job_that_vanished_from_the_queue_is_held_for_a_person(desk: Desk) -> None:
    desk.tick(PENDING)
    desk.tick(None)
    assert (desk.state, desk.says.asked, desk.incident().finding.cause) == (RunState.HELD, [], "vanished")


def test_accounting_that_does_not_answer_delays_nothing(desk: Desk) -> None:
    def away(job_id: str) -> list[JobRecord]:
        raise SchedulerUnavailable("slurmdbd is away")

    desk.says.starts = away
    desk.tick()
    desk.tick(ended(JobState.FAILED, exit_code=7))
    assert desk.says.asked == ["requeue", "start_now"]
