"""Functions as runs, on the local scheduler, and what happens around submitit inside the job."""

import os
import signal
import time
from pathlib import Path

import pytest
import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError
from submitit.helpers import Checkpointable

import krea_runner
from krea_runner.clock import SystemClock
from krea_runner.config import check_run, load_run, to_toml
from krea_runner.errors import ConfigError
from krea_runner.history.store import open_history
from krea_runner.launch import submitit_entry, submitit_executor
from krea_runner.launch.submitit_entry import KreaJobEnvironment, prepare, save_checkpoint
from krea_runner.model import RunState
from krea_runner.schedulers import open_scheduler
from krea_runner.supervise.lease import own_holder
from krea_runner.supervise.supervisor import Supervisor
from krea_runner.supervise.tick import tick

LOCAL = {"run": {"scheduler": "local"}}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KREA_RUNNER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submitit_executor, "_watchers", {})
    return tmp_path / "state"


def supervise(state: Path) -> None:
    tick(
        Supervisor(
            history=open_history(state),
            open_scheduler=lambda kind: open_scheduler(kind, state_dir=state),
            clock=SystemClock(),
            user=submitit_executor._user(),
            holder=own_holder(),
        )
    )


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fails_once(marker: str) -> str:
    path = Path(marker)
    if not path.exists():
        path.touch()
        raise ValueError("the first time")
    return "the second time"


def test_results_come_back_in_the_order_of_the_ranks(state: Path) -> None:
    def rank(offset: int) -> int:
        print("here")
        return int(os.environ["SLURM_PROCID"]) + offset

    job = krea_runner.submit(rank, 7, spec={**LOCAL, "gang": {"nodes": 2, "ranks_per_node": 2}})
    assert job.results() == [7, 8, 9, 10]
    assert "here\n" in (job.task(3).stdout() or "")
    assert load_run(job.task(0)._run_dir / "run.toml").gang.world_size == 4


def test_an_exception_ends_an_attempt_and_the_run_goes_on(state: Path, tmp_path: Path) -> None:
    job = krea_runner.submit(fails_once, str(tmp_path / "marker"), spec=LOCAL)
    wait_for(lambda: job.get_info() and job.state == "FAILED")
    assert not job.done(force_check=True)
    supervise(state)
    assert job.result() == "the second time"


def test_an_exception_comes_back_when_the_run_is_held(state: Path, tmp_path: Path) -> None:
    job = krea_runner.submit(fails_once, str(tmp_path / "marker"), spec={**LOCAL, "policy": {"max_restarts": 0}})
    wait_for(lambda: job.get_info() and job.state == "FAILED")
    supervise(state)
    with pytest.raises(FailedJobError, match="ValueError: the first time"):
        job.result()
    assert job.run().state is RunState.HELD


def test_an_exception_comes_back_when_nobody_supervises(state: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(submitit_executor, "NOBODY_S", 0.0)
    job = krea_runner.submit(fails_once, str(tmp_path / "marker"), spec=LOCAL)
    wait_for(lambda: job.get_info() and job.state == "FAILED")
    assert isinstance(job.exception(), FailedJobError)


def test_map_array_makes_a_run_of_each_call(state: Path, tmp_path: Path) -> None:
    executor = krea_runner.KreaExecutor(tmp_path / "sweep", spec=LOCAL)
    executor.update_parameters(name="sums", timeout_min=10, mem_gb=2)
    jobs = executor.map_array(lambda a, b: a + b, [1, 2], [10, 20])
    assert [job.result() for job in jobs] == [11, 22]
    runs = open_history(state).list_runs()
    assert [run.name for run in runs] == ["sums", "sums"]
    assert {run.config.run_dir.parent for run in runs} == {tmp_path / "sweep"}
    assert dict(runs[0].config.slurm) == {"time": "10", "mem": "2048M"}


def test_submitits_own_auto_executor_finds_ours(state: Path, tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(tmp_path / "auto", cluster="krea", krea_spec=LOCAL)
    executor.update_parameters(name="auto", tasks_per_node=2, timeout_min=5, krea_partition="train")
    job = executor.submit(max, 3, 4)
    assert job.results() == [4, 4]
    (run,) = open_history(state).list_runs()
    assert (run.name, run.config.slurm["partition"]) == ("auto", "train")
    assert submitit.AutoExecutor(tmp_path / "other").cluster != "krea"


def test_cancel_is_a_stop_for_good(state: Path) -> None:
    job = krea_runner.submit(time.sleep, 60, spec=LOCAL)
    wait_for(lambda: job.get_info() and job.state == "RUNNING")
    job.cancel()
    wait_for(lambda: job.get_info() and job.state == "CANCELLED")
    supervise(state)
    assert job.run().state is RunState.STOPPED
    with pytest.raises(UncompletedJobError, match="STOPPED: stopped through submitit"):
        job.result()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"run": {"command": ["true"]}}, "the function is what runs"),
        ({"slurm": {"partitoin": "gpu"}}, "did you mean partition"),
        ({"run": {"dir": "a%job"}, **{"gang": {}}}, "submitit would replace the %"),
    ],
)
def test_a_spec_that_cannot_be_meant_submits_nothing(state: Path, spec, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        krea_runner.submit(len, "x", spec=spec)
    assert said in str(refused.value) + str(refused.value.problems)
    assert not state.exists()


def test_tables_survive_the_way_through_toml(tmp_path: Path) -> None:
    tables = {
        "run": {"name": 'a "b" \\ ü', "command": ["x", "a\tb\x7f"], "dir": str(tmp_path)},
        "env": {"A": "1"},
        "gang": {"nodes": 3},
        "slurm": {"exclusive": True, "extra": ["--switches=2"]},
    }
    (tmp_path / "run.toml").write_text(to_toml(tables))
    assert load_run(tmp_path / "run.toml") == check_run(tables, tmp_path, what="tables")


# ------------------------------------------------------------------------------------------------------ inside the job


class Counter(Checkpointable):
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, more: int) -> int:
        self.count += more
        return self.count


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of job 12, as rank 0 sees it."""
    for name, value in {
        "SUBMITIT_EXECUTOR": "krea", "SUBMITIT_FOLDER": str(tmp_path), "SLURM_JOB_ID": "12", "SLURM_PROCID": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    DelayedSubmission(Counter(), 1).dump(tmp_path / submitit_entry.FUNCTION)
    return tmp_path


def loaded(path: Path) -> int:
    return DelayedSubmission.load(path).function.count


def test_a_first_start_takes_the_function_as_it_was_submitted(folder: Path) -> None:
    prepare(JobPaths(folder, "12", 0))
    assert loaded(folder / "12_submitted.pkl") == 0


def test_a_job_submitted_again_takes_what_the_earlier_one_saved(folder: Path) -> None:
    counter = Counter()
    counter(5)
    save_checkpoint(counter, 1)
    prepare(JobPaths(folder, "13", 0))
    assert loaded(folder / "13_submitted.pkl") == 5


def test_what_a_killed_attempt_left_half_written_is_cleared_away(folder: Path) -> None:
    for name in ("12_0_result.pkl", "12_0_result.pkl.save_tmp", "12_1_result.pkl"):
        (folder / name).write_bytes(b"half")
    prepare(JobPaths(folder, "12", 0))
    assert sorted(path.name for path in folder.glob("*result*")) == ["12_1_result.pkl"]


def test_only_rank_0_writes_a_checkpoint(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    save_checkpoint(Counter(), 1)
    prepare(JobPaths(folder, "12", 1))
    assert not (folder / "12_submitted.pkl").exists()


def test_outside_of_a_job_a_checkpoint_is_nothing(folder: Path, monkeypatch) -> None:
    monkeypatch.delenv("SUBMITIT_EXECUTOR")
    save_checkpoint(Counter(), 1)
    assert not list(folder.glob("12_*"))


def test_the_end_saves_the_state_once_and_requeues_nothing(folder: Path, monkeypatch) -> None:
    called = []
    monkeypatch.setattr("subprocess.check_call", lambda *words, **_: called.append(words))
    monkeypatch.setattr("time.sleep", called.append)
    counter = Counter()
    counter(3)
    handler = submitit_entry._Ending(KreaJobEnvironment(), JobPaths(folder, "12", 0), DelayedSubmission(counter, 1))
    with pytest.raises(SystemExit) as ended:
        handler(signal.SIGUSR2, None)
    assert (ended.value.code, called) == (128 + signal.SIGUSR2, [submitit_entry.WAIT_FOR_END_S])
    counter(1)
    handler(signal.SIGTERM, None)  # it comes while the first is being dealt with
    assert loaded(folder / "12_submitted.pkl") == 3


def test_a_checkpoint_that_fails_keeps_the_state_saved_before(folder: Path) -> None:
    class Broken(Counter):
        def checkpoint(self, more: int) -> DelayedSubmission:
            raise RuntimeError("no disk")

    prepare(JobPaths(folder, "12", 0))
    handler = submitit_entry._Ending(KreaJobEnvironment(), JobPaths(folder, "12", 0), DelayedSubmission(Broken(), 1))
    with pytest.raises(SystemExit):
        handler(signal.SIGTERM, None)
    assert loaded(folder / "12_submitted.pkl") == 0


def test_a_function_that_saves_nothing_runs_on_until_slurm_ends_it(folder: Path) -> None:
    handler = submitit_entry._Ending(KreaJobEnvironment(), JobPaths(folder, "12", 0), DelayedSubmission(len, "x"))
    handler(signal.SIGUSR2, None)
    with pytest.raises(SystemExit):
        handler(signal.SIGTERM, None)
    assert not list(folder.glob("12_*"))
