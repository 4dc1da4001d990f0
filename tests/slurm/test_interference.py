"""What other people, Slurm itself and a slow controller do to a run meanwhile: nothing is doubled, no false alarm."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from krea_runner.observe.heartbeats import read_heartbeats
from tests.conftest import SlurmCluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


@dataclass
class Desk:
    """An ordinary user with a small gang of `krea_runner.demo.train`; root's commands where a case needs an operator."""

    user: Any
    cluster: SlurmCluster
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {**self.cluster.env, "KREA_RUNNER_STATE_DIR": str(self.folder / "state")}

    def krea(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "krea_runner", *words]
        return self.user.run(argv, env=self.env, cwd=self.folder, timeout=120, check=check)

    def slurm(self, *argv: str) -> str:
        return self.user.run(list(argv), env=self.env, timeout=60).stdout

    def operator(self, *argv: str) -> str:
        if os.geteuid() != 0:
            pytest.skip("needs root, whom the cluster takes for its operator")
        env = {**os.environ, **self.cluster.env}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60).stdout

    def submit(self, *, steps: int = 4000, budget: str = "5s", check: bool = True, slurm: str = "") -> str:
        command = [sys.executable, "-m", "krea_runner.demo.train", "--steps", str(steps), "--checkpoint-every", "10"]
        (self.folder / "run.toml").write_text(
            textwrap.dedent(f"""
            [run]
            name = "gang"
            command = {json.dumps([*command, "--step-time", "0.1"])}
            dir = "run"
            [gang]
            nodes = 2
            ranks_per_node = 2
            [slurm]
            {slurm}
            [budgets]
            step = "{budget}"
            checkpoint = "{budget}"
            [checkpoint]
            dir = "ckpt"
            """)
        )
        done = self.krea("submit", "run.toml", "--json", check=check)
        return json.loads(done.stdout)["job_id"] if done.returncode == 0 else ""

    def step(self, job_id: str, restart: int = 0) -> int:
        attempt = f"{job_id}.r{restart}"
        ranks = read_heartbeats(self.folder / "run" / "heartbeats" / attempt, attempt).ranks
        return max((beat.step for beat in ranks), default=-1)

    def wait_for_steps(self, job_id: str, restart: int = 0, steps: int = 3) -> None:
        until(lambda: self.step(job_id, restart) >= 0, "the first step")
        first = self.step(job_id, restart)
        until(lambda: self.step(job_id, restart) >= first + steps, "more steps")

    def job(self, job_id: str) -> tuple[str, int]:
        words = self.slurm("squeue", "-h", "-t", "all", "-j", job_id, "-O", "State:|,RestartCnt:|").strip().split("|")
        return words[0], int(words[1])

    def incidents(self) -> list[tuple[str, str]]:
        document = json.loads(self.krea("history", "--json").stdout)
        return [(incident["symptom"], incident["decision"]) for incident in document["incidents"]]

    def tick(self) -> str:
        return self.krea("supervise", "--once", "--verbose").stdout


@pytest.fixture
def desk(slurm_cluster, ordinary_user) -> Iterator[Desk]:
    desk = Desk(ordinary_user, slurm_cluster, Path(ordinary_user.make_dir()))
    yield desk
    desk.slurm("scancel", "--me")
    until(lambda: not desk.slurm("squeue", "-h", "--me").strip(), "an empty queue")


def test_a_suspended_job_is_no_hang_neither_during_nor_after(desk: Desk) -> None:
    job_id = desk.submit()
    desk.wait_for_steps(job_id)
    desk.tick()
    desk.operator("scontrol", "suspend", job_id)
    until(lambda: desk.job(job_id)[0] == "SUSPENDED", "the suspension")
    for _ in range(4):
        desk.tick()
        time.sleep(3)
    desk.operator("scontrol", "resume", job_id)
    until(lambda: desk.job(job_id)[0] == "RUNNING", "the resumption")
    for _ in range(3):
        desk.tick()
    desk.wait_for_steps(job_id)
    assert (desk.job(job_id), desk.incidents()) == (("RUNNING", 0), [])


def test_a_requeue_by_hand_is_adopted_not_doubled(desk: Desk) -> None:
    job_id = desk.submit()
    desk.wait_for_steps(job_id)
    desk.tick()
    time.sleep(1)
    desk.slurm("scontrol", "requeue", job_id)
    until(lambda: desk.job(job_id)[0] == "PENDING", "the queue")
    desk.tick()
    desk.tick()
    assert (desk.job(job_id), desk.incidents()) == (("PENDING", 1), [("requeued_elsewhere", "WAIT")])
    desk.slurm("scancel", job_id)
    until(lambda: desk.job(job_id)[0] == "CANCELLED", "the cancel")
    desk.tick()
    assert desk.incidents() == [("requeued_elsewhere", "WAIT"), ("cancelled", "STOP")]


def test_a_node_set_down_is_requeued_by_slurm_and_only_by_slurm(desk: Desk) -> None:
    job_id = desk.submit()
    desk.wait_for_steps(job_id)
    desk.tick()
    node = desk.slurm("squeue", "-h", "-j", job_id, "-O", "BatchHost:|").strip("|\n ")
    desk.operator("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        until(lambda: desk.job(job_id)[0] == "PENDING", "Slurm's own requeue")
        desk.tick()
        desk.tick()
        assert (desk.job(job_id)[1], desk.incidents()) == (1, [("node_fail", "WAIT")])
    finally:
        desk.operator("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_held_job_waits_and_is_shown_as_held(desk: Desk) -> None:
    job_id = desk.submit(slurm="hold = true")
    for _ in range(2):
        assert "JobHeldUser" in desk.tick()
    assert (desk.job(job_id), desk.incidents()) == (("PENDING", 0), [])
    desk.slurm("scontrol", "release", job_id)
    desk.wait_for_steps(job_id)


def test_a_cancel_while_our_requeue_waits_is_final(desk: Desk) -> None:
    job_id = desk.submit()
    desk.wait_for_steps(job_id)
    ranks = read_heartbeats(desk.folder / "run" / "heartbeats" / f"{job_id}.r0", f"{job_id}.r0").ranks
    os.kill(ranks[2].pid, signal.SIGKILL)
    until(lambda: desk.job(job_id)[0] == "FAILED", "the crash")
    desk.operator("scontrol", "update", "partitionname=train", "state=down")
    try:
        desk.tick()
        assert desk.job(job_id) == ("PENDING", 1)
        desk.slurm("scancel", job_id)
        until(lambda: desk.job(job_id)[0] == "CANCELLED", "the cancel")
        for _ in range(3):
            desk.tick()
    finally:
        desk.operator("scontrol", "update", "partitionname=train", "state=up")
    desk.tick()
    assert desk.job(job_id) == ("CANCELLED", 1)
    assert desk.incidents() == [("crash", "REQUEUE"), ("cancelled", "STOP")]


def test_a_submission_whose_answer_was_lost_is_found_by_its_tag(desk: Desk) -> None:
    controller = int((desk.cluster.folder / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        job_id = desk.submit(check=False)
        again = desk.krea("submit", "run.toml", check=False)
    finally:
        os.kill(controller, signal.SIGCONT)
    assert job_id == ""
    assert (again.returncode, "a run is alive in" in again.stderr) == (1, True)
    until(lambda: desk.slurm("squeue", "-h", "--me", "-o", "%i").strip() != "", "the ghost")  # carried out after all
    assert "by its tag" in desk.tick()
    (found,) = desk.slurm("squeue", "-h", "--me", "-o", "%i").split()
    assert json.loads(desk.krea("status", "--json").stdout)["runs"][0]["job_id"] == found
    desk.wait_for_steps(found)


def test_a_controller_that_stalls_in_a_requeue_is_carried_on_with(desk: Desk) -> None:
    job_id = desk.submit()
    desk.wait_for_steps(job_id)
    ranks = read_heartbeats(desk.folder / "run" / "heartbeats" / f"{job_id}.r0", f"{job_id}.r0").ranks
    os.kill(ranks[1].pid, signal.SIGKILL)
    until(lambda: desk.job(job_id)[0] == "FAILED", "the crash")
    controller = int((desk.cluster.folder / "run" / "slurmctld.pid").read_text())
    tick = desk.user.popen([sys.executable, "-m", "krea_runner", "supervise", "--once"], env=desk.env, cwd=desk.folder)
    until(lambda: desk.incidents() != [], "the incident")  # on record: the requeue comes next
    os.kill(controller, signal.SIGSTOP)
    time.sleep(3)
    os.kill(controller, signal.SIGCONT)
    tick.communicate(timeout=90)
    desk.tick()
    desk.wait_for_steps(job_id, restart=1)
    assert (desk.job(job_id), desk.incidents()) == (("RUNNING", 1), [("crash", "REQUEUE")])
