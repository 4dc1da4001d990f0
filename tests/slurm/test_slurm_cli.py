"""SlurmCli against a real Slurm: what it makes of refusals, of a controller that is away, and of forgotten jobs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from krea_runner.errors import JobNotFound, SchedulerError, SchedulerUnavailable
from krea_runner.model import JobRecord, JobState
from krea_runner.proc import run
from krea_runner.schedulers.slurm_cli import SlurmCli
from krea_runner.schedulers.slurm_parse import parse_config

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
PATIENCE_S = 120.0
UNKNOWN = "999999"


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.1)


def said(*argv: str) -> str:
    done = run(argv, timeout_s=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Lab:
    """The scheduler, and the controller behind it."""

    def __init__(self, folder: Path) -> None:
        self.slurm = SlurmCli()
        self.folder = folder

    def script(self, command: str, *options: str) -> Path:
        path = self.folder / "job.sbatch"
        lines = ["#!/bin/sh", "#SBATCH --output=/dev/null", *(f"#SBATCH {option}" for option in options), command]
        path.write_text("\n".join(lines) + "\n")
        return path

    def submit(self, command: str, *options: str, tag: str = "test") -> str:
        return self.slurm.submit(self.script(command, *options), tag=tag)

    def wait(self, job_id: str, state: JobState) -> JobRecord:
        wait_until(lambda: self.slurm.jobs([job_id])[job_id].state is state, f"job {job_id} to be {state}")
        return self.slurm.jobs([job_id])[job_id]

    def config(self) -> dict[str, str]:
        return dict(parse_config(said("scontrol", "show", "config")))

    @contextmanager
    def controller_stopped(self) -> Iterator[None]:
        pid = int(Path(self.config()["SlurmctldPidFile"]).read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def controller_killed(self, job_id: str) -> Iterator[None]:
        # It saves changes every five seconds, and killed before that forgets whole jobs (22.05.8): not what is tested.
        saved = Path(self.config()["StateSaveLocation"]) / "job_state"
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        said("scontrol", "update", f"jobid={job_id}", "comment=to be saved")
        wait_until(lambda: saved.exists() and saved.stat().st_mtime_ns != before, "the controller to save its jobs")
        os.kill(int(Path(self.config()["SlurmctldPidFile"]).read_text()), signal.SIGKILL)
        try:
            yield
        finally:
            subprocess.run(["slurmctld"], check=True)
            wait_until(self._is_up, "the controller and its nodes")

    def _is_up(self) -> bool:
        nodes = run(["sinfo", "-h", "-N", "-o", "%T"], timeout_s=60)
        return nodes.returncode == 0 and set(nodes.stdout.split()) <= {"idle", "mixed", "allocated"}

    @contextmanager
    def short_memory(self) -> Iterator[None]:
        """Ended jobs are forgotten at once, instead of after five minutes."""
        path = Path(os.environ["SLURM_CONF"])
        before = path.read_text()
        lines = [line for line in before.splitlines() if not line.startswith("MinJobAge")]
        path.write_text("\n".join(["MinJobAge=2", *lines]) + "\n")
        said("scontrol", "reconfigure")
        try:
            yield
        finally:
            path.write_text(before)
            said("scontrol", "reconfigure")

    def in_squeue(self, job_id: str) -> bool:
        return bool(said("squeue", "-h", "-t", "all", "-j", f"{job_id},{job_id}", "-o", "%i"))


def open_lab(env: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    lab = Lab(folder)
    yield lab
    said("scancel", "--me")


@pytest.fixture
def lab(slurm_cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    yield from open_lab(slurm_cluster.env, tmp_path, monkeypatch)


@pytest.fixture
def accounting_lab(slurm_accounting_cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    yield from open_lab(slurm_accounting_cluster.env, tmp_path, monkeypatch)


# ---------------------------------------------------------------------------------------------------- refusals, readers


def test_users_preferences_change_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_FORMAT2": "JobID",
        "SQUEUE_STATES": "PENDING",
        "SQUEUE_USERS": "nobody",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_CLUSTERS": "moon",
        "SBATCH_TIMELIMIT": "nonsense",
        "SBATCH_ARRAY_INX": "1-3",
    }.items():
        monkeypatch.setenv(name, value)
    job_id = lab.submit("exit 7", tag="preferences | and\nbreaks")
    job = lab.wait(job_id, JobState.FAILED)
    assert (job.exit_code, job.signal) == (7, 0)
    assert job.started_at is not None
    assert [found.job_id for found in lab.slurm.find_by_tag("preferences | and\nbreaks")] == [job_id]


def test_refusals_keep_slurms_words(lab: Lab) -> None:
    with pytest.raises(SchedulerError, match="Invalid partition name specified"):
        lab.submit("true", "--partition=nope")
    with pytest.raises(JobNotFound):
        lab.slurm.requeue(UNKNOWN)
    with pytest.raises(JobNotFound):
        lab.slurm.start_now(UNKNOWN)
    lab.slurm.cancel(UNKNOWN)
    fixed = lab.submit("sleep 600", "--no-requeue")
    assert lab.wait(fixed, JobState.RUNNING).requeue_allowed is False
    with pytest.raises(SchedulerError, match="presently disabled") as caught:
        lab.slurm.requeue(fixed)
    assert not caught.value.transient


def test_somebody_elses_job_is_refused(lab: Lab, ordinary_user, slurm_cluster) -> None:
    job_id = lab.submit("sleep 600")
    lab.wait(job_id, JobState.RUNNING)
    code = (
        "from krea_runner.errors import SchedulerError\n"
        "from krea_runner.schedulers.slurm_cli import SlurmCli\n"
        "slurm = SlurmCli()\n"
        "for call in (slurm.requeue, slurm.start_now, slurm.cancel):\n"
        "    try:\n"
        f"        call({job_id!r})\n"
        "    except SchedulerError as error:\n"
        "        print(type(error).__name__, error, error.hint, sep='|')\n"
        f"print(slurm.jobs([{job_id!r}])[{job_id!r}].state)\n"
    )
    done = ordinary_user.run([sys.executable, "-c", code], env=slurm_cluster.env, timeout=60)
    *refused, state = done.stdout.splitlines()
    assert [line.split("|")[0] for line in refused] == ["SchedulerError"] * 3
    assert ["permission denied" in line or "Invalid user id" in line for line in refused] == [True] * 3
    assert ["owner" in line for line in refused] == [True] * 3
    assert state == "RUNNING"


def test_checks_of_a_real_cluster_are_ok(lab: Lab) -> None:
    found = {check.name: check for check in lab.slurm.checks()}
    assert [check for check in found.values() if not check.ok] == []
    assert lab.config()["SLURM_VERSION"] in found["controller"].detail
    assert "off" in found["accounting"].detail


# ----------------------------------------------------------------------------------------------- a controller that is away


def test_killed_controller_is_unavailable_and_not_an_empty_queue(lab: Lab) -> None:
    job_id = lab.submit("sleep 600")
    lab.wait(job_id, JobState.RUNNING)
    script = lab.script("true")
    calls: list[Callable[[], object]] = [
        lambda: lab.slurm.jobs([job_id]),
        lambda: lab.slurm.find_by_tag("test"),
        lambda: lab.slurm.submit(script, tag="lost"),
        lambda: lab.slurm.requeue(job_id),
        lambda: lab.slurm.start_now(job_id),
        lambda: lab.slurm.cancel(job_id),
    ]
    with lab.controller_killed(job_id):
        with ThreadPoolExecutor(len(calls)) as pool:  # each of them waits for ten seconds
            errors = [future.exception() for future in [pool.submit(call) for call in calls]]
        checks = {check.name: check for check in lab.slurm.checks()}
    assert [type(error) for error in errors] == [SchedulerUnavailable] * len(calls)
    assert not checks["controller"].ok
    assert checks["controller"].hint
    assert lab.slurm.jobs([job_id])[job_id].state is JobState.RUNNING
    assert lab.slurm.find_by_tag("lost") == []


def test_submission_whose_answer_was_lost_is_found_by_its_tag(lab: Lab) -> None:
    with lab.controller_stopped(), pytest.raises(SchedulerUnavailable):
        lab.submit("sleep 600", tag="krea_runner/lost answer")
    wait_until(lambda: bool(lab.slurm.find_by_tag("krea_runner/lost answer")), "the job to appear")
    assert len(lab.slurm.find_by_tag("krea_runner/lost answer")) == 1


# ----------------------------------------------------------------------------------------------------- forgotten jobs


def test_forgotten_job_is_absent_without_accounting(lab: Lab) -> None:
    job_id = lab.submit("exit 7")
    lab.wait(job_id, JobState.FAILED)
    running = lab.submit("sleep 600")
    with lab.short_memory():
        wait_until(lambda: not lab.in_squeue(job_id), "Slurm to forget the job")
        assert lab.slurm.jobs([job_id]) == {}
        assert set(lab.slurm.jobs([job_id, running])) == {running}


def test_forgotten_job_is_remembered_by_accounting(accounting_lab: Lab) -> None:
    lab = accounting_lab
    job_id = lab.submit("exit $((7 + 0$SLURM_RESTART_COUNT))")
    lab.wait(job_id, JobState.FAILED)
    lab.slurm.requeue(job_id)
    lab.wait(job_id, JobState.PENDING)
    time.sleep(1.2)  # a start within the second of the requeue is refused
    lab.slurm.start_now(job_id)
    known = lab.wait(job_id, JobState.FAILED)
    with lab.short_memory():
        wait_until(lambda: not lab.in_squeue(job_id), "Slurm to forget the job")
        remembered = lab.slurm.jobs([job_id])[job_id]
        assert lab.slurm.jobs([UNKNOWN]) == {}
    assert (known.restart_count, known.exit_code) == (1, 8)
    assert remembered.state is JobState.FAILED
    for name in ("restart_count", "exit_code", "signal", "started_at", "ended_at", "nodelist"):
        assert getattr(remembered, name) == getattr(known, name), name
