"""What one tick asks of the controller, counted by commands that stand before Slurm's own on PATH."""

import os
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from krea_runner.clock import SystemClock
from krea_runner.history.exclusions import add_exclusions
from krea_runner.history.store import History, open_history
from krea_runner.model import DecisionKind, JobState, RunConfig, RunState
from krea_runner.proc import run
from krea_runner.schedulers.slurm_cli import SlurmCli
from krea_runner.supervise.supervisor import Supervisor
from krea_runner.supervise.tick import tick
from tests.conftest import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

COMMANDS = ("squeue", "sinfo", "sacct", "scontrol", "scancel", "sbatch", "sacctmgr", "sdiag", "sprio", "sstat")
RUNS = 30


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder, self.slurm, self.clock = folder, SlurmCli(), SystemClock()
        self.history: History = open_history(folder / "state")
        self.supervisor = Supervisor(self.history, lambda _: self.slurm, self.clock, "root", "test:1:1")

    def add(self, number: int, *, tag: str = "", command: str = "") -> str:
        """A run whose job waits in the queue, held; or does `command`."""
        tag = tag or f"krea_runner/{uuid.uuid4().hex}"
        config = RunConfig(
            name=f"run{number}", slug=f"run{number}", run_dir=self.folder / str(number), command=("true",),
            workdir=self.folder,
        )  # fmt: skip
        record = self.history.create_run(config, user="root", tag=tag, now=self.clock.wall())
        options = ["--requeue"] if command else ["-H"]
        argv = ["sbatch", "--parsable", *options, "-J", config.slug, "-o", "/dev/null", f"--comment={tag}"]
        done = run([*argv, f"--wrap={command or 'true'}"], timeout_s=60)
        assert done.returncode == 0, done.stderr
        self.history.set_submitted(record.run_id, done.stdout.strip(), now=self.clock.wall())
        return done.stdout.strip()

    @property
    def asked(self) -> Counter[str]:
        log = self.folder / "asked"
        return Counter(log.read_text().split()) if log.exists() else Counter()

    def forget(self) -> None:
        (self.folder / "asked").unlink(missing_ok=True)


@pytest.fixture
def desk(slurm_cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for command in COMMANDS:
        real = shutil.which(command)
        if real is not None:
            (bin_dir / command).write_text(f'#!/bin/sh\necho {command} >>{tmp_path}/asked\nexec {real} "$@"\n')
            (bin_dir / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    yield Desk(tmp_path)
    assert run(["scancel", "--me"], timeout_s=60).returncode == 0
    until(lambda: not run(["squeue", "-h", "--me"], timeout_s=60).stdout, "an empty queue")


def test_a_tick_asks_once_however_many_runs_there_are(desk: Desk) -> None:
    for number in range(RUNS):
        desk.add(number)
    desk.forget()
    report = tick(desk.supervisor)
    assert len(report.lines) == RUNS
    assert not report.blind
    assert desk.asked == {"squeue": 1}


def test_a_lost_submission_costs_no_further_question(desk: Desk) -> None:
    desk.add(0)
    job_id = desk.add(1)
    lost = desk.history.find_run("run1")
    desk.history.set_run_state(lost.run_id, RunState.SUBMITTING, "", now=desk.clock.wall())
    desk.forget()
    tick(desk.supervisor)
    assert desk.asked == {"squeue": 1}
    assert desk.history.run(lost.run_id).job_id == job_id


def test_a_controller_that_stands_still_costs_one_question_and_is_could_not_see(desk: Desk, slurm_cluster) -> None:
    for number in range(3):
        desk.add(number)
    desk.forget()
    pid = int((slurm_cluster.folder / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        report = tick(desk.supervisor)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert desk.asked == {"squeue": 1}
    assert [line.blind for line in report.lines] == [True] * 3
    assert desk.history.incidents() == []


@pytest.mark.parametrize("off", [[], ["n4"]], ids=["anywhere", "off a node"])
def test_runs_that_crash_together_cost_hardly_more_looks_than_one(desk: Desk, off: list[str]) -> None:
    """The dance of a requeue looks at the job ten times a second: at all jobs at once. Accounting is asked once, and so are the
    nodes where there are exclusions."""
    now = desk.clock.wall()
    add_exclusions(desk.history, off, run_id=None, user="root", reason="why", who="h", now=now, expires_at=None)
    jobs = [desk.add(number, command="exit 7") for number in range(12)]
    until(lambda: {job.state for job in desk.slurm.jobs(jobs).values()} == {JobState.FAILED}, "the crashes")
    time.sleep(1.1)  # into another second than the starts
    desk.forget()
    report = tick(desk.supervisor)
    assert {job.restart_count for job in desk.slurm.jobs(jobs).values()} == {1}, report
    assert [incident.decision.kind for incident in desk.history.incidents()] == [DecisionKind.REQUEUE] * len(jobs)
    assert desk.asked["scontrol"] == 2 * len(jobs) + len(off)  # requeue, and the start time; show node
    assert {placed.excluded for placed in desk.slurm.placements(jobs).values()} == {tuple(off)}
    assert desk.asked["sacct"] == 1
    assert desk.asked["squeue"] < 5 * len(jobs)
