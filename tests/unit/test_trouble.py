"""One run's trouble is nobody else's; a stop, a scancel and a lost answer hold at every moment. Records as in test_tick.py."""

import dataclasses
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Never

import pytest
import sqlalchemy as sa

from krea_runner.errors import ConfigError, HistoryError, KreaRunnerError, SchedulerError, SchedulerUnavailable
from krea_runner.history.exclusions import add_exclusions
from krea_runner.history.schema import attempts
from krea_runner.history.store import open_history
from krea_runner.launch.submit import submit
from krea_runner.model import ActionKind, AttemptKey, JobRecord, JobState, Policy, RunState
from krea_runner.schedulers import NodeRecord, Placement
from krea_runner.supervise.act import SUBMIT_AGAIN_S
from krea_runner.supervise.supervisor import TickReport
from krea_runner.supervise.tick import tick

from .conftest import FakeClock, make_config
from .test_tick import PENDING, RUNNING, Desk, Says, desk, ended  # noqa: F401

FAILED = ended(JobState.FAILED, exit_code=1)
WAITS = JobRecord("7", JobState.PENDING, "PENDING", "BeginTime", 1, started_at=2e9)


def raiser(error: Exception) -> Callable[..., Never]:
    def fail(*_: Any, **__: Any) -> Never:
        raise error

    return fail


def texts(report: TickReport) -> str:
    return "\n".join(f"{line.run.name}: {line.text}" for line in report.lines)


class Many(Says):
    """Jobs side by side; a requeue makes one PENDING, its start RUNNING."""

    def __init__(self, *jobs: JobRecord) -> None:
        super().__init__()
        self.all = {job.job_id: job for job in jobs}

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        return {job_id: self.all[job_id] for job_id in job_ids if job_id in self.all}

    def my_jobs(self, known: Sequence[str]) -> dict[str, JobRecord]:
        return dict(self.all)

    def requeue(self, job_id: str) -> None:
        self.all[job_id] = dataclasses.replace(WAITS, job_id=job_id)

    def start_now(self, job_id: str, excluded: Sequence[str] | None = None) -> None:
        self.all[job_id] = dataclasses.replace(RUNNING, job_id=job_id, restart_count=1)


def another_run(desk: Desk, folder: Path, name: str, job_id: str, **changes: Any) -> int:
    config = make_config(folder, scheduler="slurm", run_dir=folder / name, name=name, slug=name, **changes)
    config.run_dir.mkdir()
    run = desk.history.create_run(config, user="alice", tag=name, now=desk.clock.wall())
    desk.history.set_submitted(run.run_id, job_id, now=desk.clock.wall())
    return run.run_id


# ------------------------------------------------------------------------------------------------ one of many


def test_a_command_that_is_refused_for_one_run_holds_up_no_other(desk: Desk, tmp_path: Path) -> None:
    other = another_run(desk, tmp_path, "second", "9")
    desk.says = says = Many(FAILED, dataclasses.replace(FAILED, job_id="9"))
    start = says.start_now

    def refuse_the_first(job_id: str, excluded: Sequence[str] | None = None) -> None:
        if job_id == "7":
            raise SchedulerError("Requested operation not permitted by the job_submit plugin")
        start(job_id)

    says.start_now = refuse_the_first
    said = texts(desk.tick())
    assert desk.history.actions(other)[0].stage == "DONE"
    assert "requeue of job 7 under way" in said
    assert "not permitted by the job_submit plugin" in said
    says.start_now = start
    desk.tick()
    assert desk.history.open_action(desk.run_id) is None


def test_our_own_fault_in_one_action_holds_up_no_other(desk: Desk, tmp_path: Path) -> None:
    other = another_run(desk, tmp_path, "second", "9")
    desk.says = says = Many(FAILED, dataclasses.replace(FAILED, job_id="9"))
    requeue = says.requeue

    def faulty(job_id: str) -> None:
        if job_id == "7":
            raise KeyError("nobody thought of this")
        requeue(job_id)

    says.requeue = faulty
    assert "a fault of krea-runner itself: KeyError" in texts(desk.tick())
    assert desk.history.actions(other)[0].stage == "DONE"


def test_a_stop_of_one_run_in_mid_tick_is_said_of_that_run_and_the_others_go_on(
    desk: Desk,
    tmp_path: Path,
) -> None:
    second, third = (another_run(desk, tmp_path, name, job) for name, job in (("second", "8"), ("third", "9")))
    jobs = [RUNNING, *(dataclasses.replace(FAILED, job_id=job) for job in ("8", "9"))]

    class StopsTheSecond(Many):
        def my_jobs(self, known: Sequence[str]) -> dict[str, JobRecord]:
            desk.history.stop_run(desk.history.run(second), reason="enough", by="bob", now=1.0)
            return super().my_jobs(known)

    desk.says = StopsTheSecond(*jobs)
    said = texts(desk.tick())
    assert "second: run" in said
    assert [action.kind for action in desk.history.actions(second)] == [ActionKind.CANCEL]
    assert desk.history.actions(third)[0].stage == "DONE"


def test_our_own_fault_in_one_run_is_said_and_keeps_nobody_from_looking_at_the_others(
    desk: Desk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = another_run(desk, tmp_path, "second", "9")
    desk.says = Many(RUNNING, dataclasses.replace(FAILED, job_id="9"))
    observe = tick.__globals__["observe"]

    def faulty(run: Any, *rest: Any) -> Any:
        if run.run_id == desk.run_id:
            raise IndexError("list index out of range")
        return observe(run, *rest)

    monkeypatch.setitem(tick.__globals__, "observe", faulty)
    report = desk.tick()
    assert "could not see, a fault of krea-runner itself: IndexError" in texts(report)
    assert report.blind
    assert len(desk.history.incidents(run_id=other)) == 1


def test_an_endpoint_that_cannot_be_set_up_blinds_its_own_runs_alone(desk: Desk, tmp_path: Path) -> None:
    another_run(desk, tmp_path, "far", "9", transport="ssh", ssh_host="login")
    supervisor = desk.supervisor()

    def open_one(endpoint: str) -> Says:
        if endpoint != "slurm":
            raise ConfigError("needs paramiko", hint="pip install 'krea-runner[ssh]'")
        return desk.says

    supervisor.open_scheduler = open_one
    desk.says.record = FAILED
    said = texts(tick(supervisor))
    assert "far: could not see: needs paramiko (pip install" in said
    assert len(desk.history.incidents(run_id=desk.run_id)) == 1


def test_a_memory_that_another_version_left_is_begun_afresh(desk: Desk) -> None:
    desk.tick(RUNNING)
    stored = '{"attempt":"7.r0","epoch_id":"x","since_mono":1,"ranks":[],"newfield":1}'
    with desk.history.database.write() as connection:
        connection.execute(sa.update(attempts).values(watch=stored))
    assert not desk.tick(RUNNING).blind


def test_two_requeues_by_slurm_between_two_ticks_are_two_incidents_and_one_action(desk: Desk) -> None:
    desk.tick(RUNNING)
    desk.says.accounting = [ended(JobState.PREEMPTED, restart_count=count) for count in (0, 1)]
    desk.tick(dataclasses.replace(WAITS, restart_count=2))
    assert [incident.finding.symptom for incident in desk.history.incidents()] == ["preempted", "preempted"]
    assert len(desk.history.actions(desk.run_id)) == 1


# ------------------------------------------------------------------------------------------- somebody else's job


INNOCENT = dataclasses.replace(RUNNING, submitted_at=1.9e9, name="innocent", comment="krea_runner/another")


@pytest.mark.parametrize("verb", ["stop", "resume"])
def test_nothing_is_done_to_another_job_that_got_our_id(desk: Desk, verb: str) -> None:
    desk.tick(dataclasses.replace(RUNNING, comment="t", submitted_at=1.8e9))
    desk.history.set_run_state(desk.run_id, RunState.HELD, "why", now=1.0)
    run = desk.history.run(desk.run_id)
    (desk.history.stop_run if verb == "stop" else desk.history.resume_run)(run, reason="r", by="b", now=1.0)
    desk.tick(INNOCENT)
    assert not {"cancel", "requeue"} & set(desk.says.asked)


def test_accountings_rows_of_an_earlier_job_of_the_same_id_are_not_ours(desk: Desk) -> None:
    desk.tick(dataclasses.replace(RUNNING, submitted_at=1.8e9))
    desk.says.accounting = [
        ended(JobState.CANCELLED, submitted_at=1.7e9, restart_count=0),
        ended(JobState.NODE_FAIL, submitted_at=1.8e9, restart_count=1),
    ]
    desk.tick(dataclasses.replace(WAITS, submitted_at=1.8e9 + 50))
    assert (desk.incident().finding.symptom, desk.state) == ("node_fail", RunState.ACTIVE)


# --------------------------------------------------------------------------------------------- stop and scancel


def test_a_stop_while_the_resubmission_is_under_way_ends_the_new_job(desk: Desk) -> None:
    desk.run_dir.script.write_text("#!/bin/sh\n")
    desk.tick(RUNNING)
    cancelled: list[str] = []

    def stopped_meanwhile(script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
        desk.history.stop_run(desk.history.run(desk.run_id), reason="enough", by="b", now=desk.clock.wall())
        return "8"

    desk.says.submit, desk.says.cancel = stopped_meanwhile, cancelled.append
    desk.tick(ended(JobState.FAILED, exit_code=1, requeue_allowed=False))
    assert "8" in cancelled
    assert desk.state is RunState.STOPPED


def test_a_stop_while_the_first_submission_is_under_way_ends_the_job_and_stays(
    desk: Desk,
    tmp_path: Path,
) -> None:
    class StoppedMeanwhile(Says):
        def submit(self, script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
            (run,) = (run for run in desk.history.list_runs() if run.tag == tag)
            desk.history.stop_run(run, reason="enough", by="b", now=1.0)
            return "99"

        def cancel(self, job_id: str) -> None:
            self.asked.append(f"cancel {job_id}")

    says = StoppedMeanwhile()
    config = make_config(tmp_path, scheduler="slurm", run_dir=tmp_path / "r3", name="third", slug="third")
    with pytest.raises(KreaRunnerError, match="job 99 is cancelled"):
        submit(config, b"", history=desk.history, scheduler=says, user="alice", clock=desk.clock)
    assert says.asked == ["cancel 99"]
    assert desk.history.find_run("third").state is RunState.STOPPED


def test_a_job_that_comes_after_its_run_was_stopped_is_ended(desk: Desk) -> None:
    desk.history._update_run(desk.run_id, job_id=None, tag="krea_runner/x", state=RunState.STOPPED)
    desk.history.set_run_state(desk.run_id, RunState.STOPPED, "stopped", now=desk.clock.wall())
    desk.says.tagged = [dataclasses.replace(PENDING, job_id="50", comment="krea_runner/x")]
    cancelled: list[str] = []
    desk.says.cancel = cancelled.append
    desk.tick(None)
    assert cancelled == ["50"]


def test_a_run_that_is_not_held_is_not_resumed(desk: Desk) -> None:
    with pytest.raises(HistoryError, match="not held"):
        desk.history.resume_run(desk.history.run(desk.run_id), reason="r", by="b", now=1.0)
    assert desk.history.actions(desk.run_id) == []


def test_a_persons_scancel_of_a_job_that_is_forgotten_since_is_final(desk: Desk) -> None:
    desk.run_dir.script.write_text("#!/bin/sh\n")
    desk.tick(RUNNING)
    desk.says.requeue = raiser(SchedulerUnavailable("away"))
    for look in range(4):
        desk.beat(5, flush=look * 10 + 50)
        desk.tick()
    assert desk.history.open_action(desk.run_id) is not None
    desk.run_dir.logs.mkdir(exist_ok=True)
    notice = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-12-02T13:27:56 ***"
    desk.run_dir.batch_log("7").write_text(f"krea_runner: attempt 7.r0 on n1\n{notice}\n")
    desk.tick(None)
    assert desk.state is RunState.STOPPED
    assert not any(asked.startswith("submit") for asked in desk.says.asked)


def test_a_job_that_is_forgotten_while_it_waits_is_a_persons_to_judge(desk: Desk) -> None:
    desk.tick(RUNNING)
    desk.says.start_now = raiser(SchedulerUnavailable("away"))
    desk.tick(FAILED)
    desk.tick(None)
    assert desk.state is RunState.HELD
    assert "krea-runner resume" in desk.history.run(desk.run_id).state_reason


def test_a_cancel_that_was_lost_is_sent_again_by_each_tick(desk: Desk) -> None:
    desk.tick(RUNNING)
    sent: list[str] = []
    desk.says.cancel = sent.append
    desk.history.stop_run(desk.history.run(desk.run_id), reason="r", by="b", now=desk.clock.wall())
    for _ in range(3):
        desk.tick()
    assert sent == ["7"] * 3


# ------------------------------------------------------------------------------------------------- lost answers


def test_a_resubmission_is_repeated_only_after_answers_without_its_tag(desk: Desk) -> None:
    desk.run_dir.script.write_text("#!/bin/sh\n")
    desk.tick(RUNNING)
    real, desk.says.submit = desk.says.submit, raiser(SchedulerUnavailable("no answer"))
    desk.tick(ended(JobState.FAILED, exit_code=1, requeue_allowed=False))
    desk.says.submit, desk.says.error = real, SchedulerUnavailable("away")
    for _ in range(20):  # blind for longer than SUBMIT_AGAIN_S
        desk.tick()
    desk.says.error = None
    desk.tick()
    assert desk.says.asked == []
    desk.clock.sleep(SUBMIT_AGAIN_S)
    desk.tick()
    assert [asked.split()[0] for asked in desk.says.asked] == ["submit"]


def test_a_first_submission_is_given_up_only_after_answers_without_its_tag(desk: Desk) -> None:
    desk.history._update_run(desk.run_id, state=RunState.SUBMITTING, job_id=None, tag="krea_runner/zz")
    desk.says.error = SchedulerUnavailable("away")
    desk.tick()
    desk.clock.sleep(700)
    desk.says.error = None
    desk.tick(None)
    assert desk.state is RunState.SUBMITTING
    desk.clock.sleep(700)
    desk.tick(None)
    assert desk.state is RunState.STOPPED


def test_a_refusal_because_it_is_in_the_queue_already_is_no_refusal(desk: Desk) -> None:
    desk.tick(RUNNING)

    def somebody_was_faster(job_id: str) -> None:
        desk.says.record = WAITS
        raise SchedulerError("requeueing job 7: Job is pending execution for job 7")

    desk.says.requeue = somebody_was_faster
    desk.tick(FAILED)
    assert (desk.state, desk.says.asked) == (RunState.ACTIVE, ["start_now"])


def test_a_start_that_the_controller_forgot_is_asked_for_again(desk: Desk) -> None:
    desk.tick(RUNNING)
    start = desk.says.start_now

    def forgotten(job_id: str) -> None:
        desk.says.record, desk.says.start_now = FAILED, start

    desk.says.start_now = forgotten
    desk.tick(FAILED)
    assert desk.says.asked == ["requeue", "requeue", "start_now"]


def test_a_requeue_of_slurms_own_that_the_controller_forgot_is_no_more_ours(desk: Desk) -> None:
    desk.tick(RUNNING)
    desk.says.accounting = [ended(JobState.NODE_FAIL, restart_count=0)]
    desk.says.my_jobs = lambda known: {"7": WAITS}
    desk.tick(RUNNING)
    assert desk.history.open_action(desk.run_id) is None
    assert "overtaken" in desk.history.actions(desk.run_id)[0].detail


# ------------------------------------------------------------------------------------------------ half done, done


def test_giving_up_and_the_runs_state_are_one_write(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.tick(RUNNING)
    desk.says.requeue = raiser(SchedulerError("no"))
    monkeypatch.setattr(desk.history, "set_run_state", raiser(sqlite3.OperationalError("killed here")))
    desk.tick(FAILED)
    assert desk.state is RunState.HELD


def test_a_restart_that_never_came_about_is_held_and_not_waited_for_for_ever(desk: Desk) -> None:
    desk.tick(RUNNING)
    desk.says.requeue = raiser(SchedulerError("no"))
    desk.tick(FAILED)
    desk.history.set_run_state(desk.run_id, RunState.ACTIVE, "as a killed tick of an older version left it", now=1.0)
    assert any(line.news and "never came about" in line.text for line in desk.tick().lines)
    assert desk.state is RunState.HELD


def test_a_person_may_resume_a_run_whose_job_completed(desk: Desk) -> None:
    desk.tick(RUNNING)
    desk.history.set_run_state(desk.run_id, RunState.HELD, "ran in /tmp", now=1.0)
    desk.history.resume_run(desk.history.run(desk.run_id), reason="r", by="alice", now=1.0)
    desk.tick(ended(JobState.COMPLETED, exit_code=0))
    assert desk.says.asked == ["requeue", "start_now"]
    assert desk.state is RunState.ACTIVE


def test_a_hang_that_we_only_watched_and_somebody_requeued_was_not_ended_by_us(
    tmp_path: Path, clock: FakeClock
) -> None:
    desk = _watching(tmp_path, clock)
    for look in range(5):
        desk.beat(5, flush=look * 10 + 50)
        desk.tick(RUNNING)
    assert len(desk.history.incidents()) == 1
    desk.tick(dataclasses.replace(RUNNING, restart_count=1))
    first = desk.history.attempts(desk.run_id)[0]
    assert (first.key, first.end_state, first.ended_by) == (AttemptKey("7"), JobState.REQUEUED, "")


def _watching(tmp_path: Path, clock: FakeClock) -> Desk:
    from krea_runner.history.store import open_history
    from krea_runner.rundir import RunDir

    history = open_history(tmp_path / "state")
    config = make_config(tmp_path, scheduler="slurm", policy=Policy(mode="observe"))
    config.run_dir.mkdir()
    run = history.create_run(config, user="alice", tag="t", now=clock.wall())
    history.set_submitted(run.run_id, "7", now=clock.wall())
    return Desk(history, clock, Says(), run.run_id, RunDir(config.run_dir))


def test_a_directory_is_not_taken_again_before_its_last_job_is_ended(desk: Desk, tmp_path: Path) -> None:
    desk.history.stop_run(desk.history.run(desk.run_id), reason="r", by="b", now=1.0)
    again = desk.history.run(desk.run_id).config
    with pytest.raises(HistoryError, match="job 7 of the last run"):
        desk.history.create_run(again, user="alice", tag="t2", now=1.0)
    desk.tick(ended(JobState.CANCELLED))
    desk.history.create_run(again, user="alice", tag="t2", now=1.0)


def test_the_first_submission_too_is_kept_off_what_is_excluded_from_all_runs(tmp_path: Path, clock: FakeClock) -> None:
    history, offs, said = open_history(tmp_path / "state"), [], []

    class Submits(Says):
        def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
            return {name: NodeRecord(name, "IDLE") for name in ("n1", "n2", "n3")}

        def placements(self, job_ids: Sequence[str]) -> dict[str, Placement]:
            assert not job_ids
            return {}

        def submit(self, script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
            offs.append(list(excluded))
            return "7"

    add_exclusions(
        history, ["n1"], run_id=None, user="alice", reason="Xid 79", who="h", now=clock.wall(), expires_at=None
    )
    for user in ("alice", "bob"):
        config = make_config(tmp_path, scheduler="slurm", run_dir=tmp_path / user, name=user, slug=user)
        submit(config, b"", history=history, scheduler=Submits(), user=user, clock=clock, tell=said.append)
    assert (offs, said) == ([["n1"], []], ["off n1"])


def test_a_directory_is_the_same_through_a_link(desk: Desk, tmp_path: Path) -> None:
    config = desk.history.run(desk.run_id).config
    (tmp_path / "link").symlink_to(config.run_dir.parent)
    linked = dataclasses.replace(config, run_dir=tmp_path / "link" / config.run_dir.name)
    with pytest.raises(HistoryError, match="a run is alive"):
        desk.history.create_run(linked, user="alice", tag="t2", now=1.0)


def test_what_may_hold_keys_is_the_users_alone_to_read(tmp_path: Path, clock: FakeClock) -> None:
    history = open_history(tmp_path / "state")
    config = make_config(tmp_path, scheduler="slurm")
    submit(config, b"", history=history, scheduler=Says(), user="alice", clock=clock)
    kept = [history.path, config.run_dir / "run.toml", config.run_dir / "job.sbatch"]
    assert [path.stat().st_mode & 0o077 for path in kept] == [0, 0, 0]


def test_a_controller_that_is_away_is_one_line_for_all_runs_and_not_said_again_by_the_next_cron_line(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from krea_runner.cli.supervise import _Printer

    for number in range(3):
        another_run(desk, tmp_path, f"more-{number}", f"1{number}")
    desk.says.error = SchedulerUnavailable("no answer in 20 s")
    report = desk.tick()
    _Printer(verbose=False, already_said=set()).emit(report)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert "llm: could not see: no answer in 20 s (and 3 more runs)" in said[0]
    _Printer(verbose=False, already_said={report.blind}).emit(desk.tick())
    assert capsys.readouterr().out == ""
