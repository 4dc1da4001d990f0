"""SlurmApi against a real Slurm of pyslurm's version (docs/how-to/pyslurm.md): the same records as the commands give, and
what a controller that is away makes of it. What every scheduler must do is in tests/contract/."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from krea_runner.errors import SchedulerUnavailable
from krea_runner.model import JobState
from krea_runner.proc import run
from krea_runner.schedulers import open_scheduler
from krea_runner.schedulers.slurm_api import TIMEOUT_S, SlurmApi
from krea_runner.schedulers.slurm_cli import SlurmCli

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline, f"waited 90 s for {what}"
        time.sleep(0.1)


@pytest.fixture
def slurm(slurm_cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmApi]:
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    scheduler = open_scheduler("slurm", state_dir=Path("/nowhere"))
    if not isinstance(scheduler, SlurmApi):
        pytest.skip(f"no pyslurm for this Slurm (docs/how-to/pyslurm.md): {scheduler.checks()[-1].detail}")
    yield scheduler
    run(["scancel", "--me"], timeout_s=60)


def submit(command: str, *options: str) -> str:
    done = run(["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def controller_pid(slurm_cluster) -> int:
    return int((slurm_cluster.folder / "run" / "slurmctld.pid").read_text())


def test_the_records_are_those_that_the_commands_give(slurm: SlurmApi) -> None:
    array, het = submit("sleep 600", "--array=0-2%1"), submit("sleep 600", ":")
    jobs = {
        submit("sleep 600", "--requeue"): JobState.RUNNING,
        submit("sleep 600", "--no-requeue", "--nodes=2"): JobState.RUNNING,
        submit("sleep 600", "--hold"): JobState.PENDING,
        submit("sleep 600", "--begin=now+1hour"): JobState.PENDING,
        submit("exit 137"): JobState.FAILED,
        submit("exit 128"): JobState.FAILED,
        submit("kill -9 $$"): JobState.FAILED,
        submit("true"): JobState.COMPLETED,
        f"{array}_0": JobState.RUNNING,
        f"{array}_1": JobState.PENDING,
        f"{array}_2": JobState.PENDING,
        array: JobState.UNKNOWN,
        het: JobState.RUNNING,
        f"{het}+1": JobState.RUNNING,
    }
    by_command = SlurmCli()

    def reached() -> bool:
        return {job_id: record.state for job_id, record in by_command.jobs(list(jobs)).items()} == jobs

    until(reached, f"{jobs}")
    expected = by_command.jobs(list(jobs))
    # The commands are told each second anew when a job that waits may start.
    seen = slurm.jobs([*jobs, "987654"])
    assert {job_id: replace(record, started_at=None) for job_id, record in seen.items()} == {
        job_id: replace(record, started_at=None) for job_id, record in expected.items()
    }
    running = [job_id for job_id, state in jobs.items() if state is JobState.RUNNING]
    assert [seen[job_id].started_at for job_id in running] == [expected[job_id].started_at for job_id in running]
    assert [seen[job_id].exit_code for job_id, state in jobs.items() if state is JobState.FAILED] == [137, 128, 0]


def test_pyslurm_still_takes_128_off_an_exit_code(slurm: SlurmApi) -> None:
    """When this fails, ended jobs need no second query any more (slurm_api's docstring)."""
    job_id = submit("exit 137")
    until(lambda: slurm.jobs([job_id])[job_id].state is JobState.FAILED, "the end")
    code = f"import pyslurm; print(pyslurm.Jobs.load()[{job_id}].exit_code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "9"


def test_a_requeued_task_leaves_the_rest_of_its_array_alone(slurm: SlurmApi) -> None:
    array = submit("sleep 600", "--array=1-2", "--requeue")
    tasks = [f"{array}_1", f"{array}_2"]
    until(lambda: all(job.state is JobState.RUNNING for job in slurm.jobs(tasks).values()), "both tasks")
    time.sleep(1)
    slurm.requeue(tasks[1])
    until(lambda: slurm.jobs(tasks)[tasks[1]].state is JobState.PENDING, "the requeue")
    first, second = slurm.jobs(tasks).values()
    assert (first.state, first.restart_count, second.restart_count) == (JobState.RUNNING, 0, 1)


def test_a_tagged_array_is_found_task_by_task_and_odd_comments_are_passed_over(slurm: SlurmApi) -> None:
    subprocess.run(
        ["sbatch", "-o/dev/null", b"--comment=\xff\xfe odd", "--wrap=sleep 600"], check=True, stdout=subprocess.DEVNULL
    )
    array = submit("sleep 600", "--array=1-2", "--comment=krea/array")
    assert sorted(job.job_id for job in slurm.find_by_tag("krea/array")) == [f"{array}_1", f"{array}_2"]
    assert slurm.find_by_tag("krea/none") == []


def test_a_silent_controller_is_unavailable_in_time_and_then_seen_again(slurm: SlurmApi, slurm_cluster) -> None:
    job_id = submit("sleep 600")
    os.kill(controller_pid(slurm_cluster), signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(SchedulerUnavailable, match=r"timed out|no answer"):
            slurm.jobs([job_id])
        assert time.monotonic() - started < TIMEOUT_S + 5
        with pytest.raises(SchedulerUnavailable):
            slurm.requeue(job_id)
    finally:
        os.kill(controller_pid(slurm_cluster), signal.SIGCONT)
    until(lambda: bool(run(["squeue", "-h"], timeout_s=60).returncode == 0), "the controller")
    assert job_id in slurm.jobs([job_id])


def test_a_controller_that_is_down_is_unavailable_and_then_seen_again(slurm: SlurmApi, slurm_cluster) -> None:
    job_id = submit("sleep 600")
    until(lambda: slurm.jobs([job_id])[job_id].state is JobState.RUNNING, "the start")
    time.sleep(6)  # a controller that is killed just after a start forgets it
    slurm_cluster.stop_controller()
    try:
        with pytest.raises(SchedulerUnavailable, match=r"contact slurm controller|refused"):
            slurm.jobs([job_id])
        with pytest.raises(SchedulerUnavailable):
            slurm.start_now(job_id)
        instead = open_scheduler("slurm", state_dir=Path("/nowhere"))
        assert isinstance(instead, SlurmCli)
    finally:
        slurm_cluster.start_controller()
    assert slurm.jobs([job_id])[job_id].job_id == job_id


def test_a_companion_that_is_killed_is_replaced(slurm: SlurmApi) -> None:
    job_id = submit("sleep 600")
    slurm.jobs([job_id])
    os.kill(companion_pid(), signal.SIGKILL)
    with pytest.raises(SchedulerUnavailable, match="pyslurm ended"):
        slurm.jobs([job_id])
    assert job_id in slurm.jobs([job_id])


def companion_pid() -> int:
    done = run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], timeout_s=10)
    found = re.findall(r"^\s*(\d+) \S+ -P \S+slurm_api_worker\.py$", done.stdout, re.MULTILINE)
    assert found
    return int(found[-1])
