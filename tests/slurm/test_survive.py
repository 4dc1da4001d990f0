"""The main job on a real Slurm, as an ordinary user: 4 nodes x 2 ranks of the PyTorch example, faults from outside."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from krea_runner.observe.heartbeats import read_heartbeats

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ddp_train.py"
STEPS, EVERY = 40, 10


@dataclasses.dataclass
class Lab:
    """One user's directory on the cluster: a run.toml, a history, and krea-runner as that user."""

    user: Any
    env: dict[str, str]
    folder: Path

    def krea(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.user.run(self._argv(words), env=self.env, cwd=self.folder, timeout=120, check=check)

    def krea_in_background(self, *words: str) -> subprocess.Popen[str]:
        return self.user.popen(self._argv(words), env=self.env, cwd=self.folder)

    def _argv(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "krea_runner", *words]

    def slurm(self, *argv: str) -> str:
        return self.user.run(list(argv), env=self.env, cwd=self.folder, timeout=60).stdout

    def submit(self, *, step_time: float = 0.15, name: str = "ddp") -> str:
        words = [sys.executable, "ddp_train.py", "--steps", str(STEPS), "--checkpoint-every", str(EVERY)]
        command = json.dumps([*words, "--step-time", str(step_time)])
        (self.folder / "run.toml").write_text(
            textwrap.dedent(f"""
            [run]
            name = "{name}"
            command = {command}
            dir = "run"
            [gang]
            nodes = 4
            ranks_per_node = 2
            [budgets]
            startup = "2m"
            step = "10s"
            checkpoint = "12s"
            [checkpoint]
            dir = "ckpt"
            """)
        )
        return json.loads(self.krea("submit", "run.toml", "--json").stdout)["job_id"]

    def rank(self, job_id: str, rank: int, *, restart: int = 0):
        attempt = f"{job_id}.r{restart}"
        reading = read_heartbeats(self.folder / "run" / "heartbeats" / attempt, attempt)
        return next((beat for beat in reading.ranks if beat.rank == rank), None)

    def wait_for_step(self, job_id: str, step: int) -> None:
        try:
            wait_until(lambda: (beat := self.rank(job_id, 0)) is not None and beat.step >= step, f"step {step}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.what_slurm_says(job_id)}") from None

    def what_slurm_says(self, job_id: str) -> str:
        logs = sorted((self.folder / "run" / "logs").rglob("*"))
        tails = [f"{path}:\n{path.read_text(errors='replace')[-2000:]}" for path in logs if path.is_file()]
        return "\n".join([self.slurm("scontrol", "show", "job", job_id), self.slurm("sinfo", "-N", "-l"), *tails])

    def incidents(self) -> list[dict[str, Any]]:
        return json.loads(self.krea("history", "--json").stdout)["incidents"]

    def run_state(self) -> str:
        return json.loads(self.krea("status", "--all", "--json", check=False).stdout)["runs"][0]["state"]

    def job(self, job_id: str) -> tuple[str, int]:
        words = self.slurm("squeue", "-h", "-t", "all", "-j", job_id, "-O", "State:|,RestartCnt:|").strip().split("|")
        return words[0], int(words[1])

    def digest(self) -> str:
        return json.loads((self.folder / "ckpt" / "final.json").read_text())["sha256"]

    def supervise_until_over(self, every: str = "2s") -> str:
        """Run a supervisor loop until the run is over; what it printed."""
        process = self.krea_in_background("supervise", "--every", every, "--for", "150s", "--verbose")
        try:
            wait_until(lambda: self.run_state() != "ACTIVE" or process.poll() is not None, "the end of the run", 150)
        finally:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        return out + err


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = 90) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
        time.sleep(0.1)


@pytest.fixture
def lab(slurm_cluster, ordinary_user) -> Iterator[Lab]:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'krea-runner[torch]'")
    folder = Path(ordinary_user.make_dir())
    shutil.copy(EXAMPLE, folder)
    lab = Lab(ordinary_user, {**slurm_cluster.env, "KREA_RUNNER_STATE_DIR": str(folder / "state")}, folder)
    yield lab
    ordinary_user.run(["scancel", "--me"], env=lab.env, timeout=60)
    wait_until(lambda: not lab.slurm("squeue", "-h", "--me").strip(), "an empty queue")


_undisturbed: dict[str, str] = {}


@pytest.fixture
def undisturbed(lab: Lab, slurm_cluster, ordinary_user) -> str:
    """The digest of the weights when nothing happens; made once."""
    if not _undisturbed:
        folder = Path(ordinary_user.make_dir())
        shutil.copy(EXAMPLE, folder)
        quiet = Lab(ordinary_user, {**slurm_cluster.env, "KREA_RUNNER_STATE_DIR": str(folder / "state")}, folder)
        job_id = quiet.submit(step_time=0)
        quiet.supervise_until_over()
        assert quiet.job(job_id) == ("COMPLETED", 0)
        assert quiet.incidents() == []
        _undisturbed["sha256"] = quiet.digest()
    return _undisturbed["sha256"]


@pytest.mark.parametrize(
    ("fault", "symptom", "cause"), [(signal.SIGSTOP, "hang", "rank_stopped"), (signal.SIGKILL, "crash", "rank_killed")]
)
def test_a_run_survives(lab: Lab, undisturbed: str, fault: signal.Signals, symptom: str, cause: str) -> None:
    job_id = lab.submit()
    lab.wait_for_step(job_id, EVERY + 3)
    victim = lab.rank(job_id, 5)
    os.kill(victim.pid, fault)
    said = lab.supervise_until_over()

    assert lab.run_state() == "DONE", said
    assert lab.job(job_id) == ("COMPLETED", 1)
    assert lab.digest() == undisturbed
    (incident,) = lab.incidents()
    assert (incident["symptom"], incident["cause"], incident["node"]) == (symptom, cause, victim.node)
    assert incident["decision"] == "REQUEUE"
    assert any(suspect["name"] == "5" for suspect in incident["suspects"])
    assert incident["checkpoint_step"] >= EVERY
    assert incident["resumed_step"] > incident["checkpoint_step"]
    assert (
        f"resumed from step {incident['checkpoint_step']}"
        in (lab.folder / "run" / "logs" / f"{job_id}.r1" / "node-0.log").read_text()
    )
    assert (lab.folder / "run" / "incidents" / f"{job_id}.r0" / "evidence.json").exists()


def test_a_users_scancel_is_recorded_and_left_alone_for_ever(lab: Lab) -> None:
    job_id = lab.submit()
    lab.wait_for_step(job_id, 1)
    lab.krea("supervise", "--once")
    lab.slurm("scancel", job_id)
    wait_until(lambda: lab.job(job_id)[0] == "CANCELLED", "the cancel")
    for _ in range(11):
        lab.krea("supervise", "--once")
    assert lab.job(job_id) == ("CANCELLED", 0)
    assert lab.run_state() == "STOPPED"
    (incident,) = lab.incidents()
    assert (incident["symptom"], incident["decision"]) == ("cancelled", "STOP")


def test_krea_runner_stop_cancels_the_job_and_keeps_it_so(lab: Lab) -> None:
    job_id = lab.submit()
    lab.wait_for_step(job_id, 1)
    lab.krea("stop", "ddp")
    assert lab.job(job_id)[0] == "CANCELLED"
    lab.krea("supervise", "--once")
    assert (lab.job(job_id), lab.run_state()) == (("CANCELLED", 0), "STOPPED")


def test_supervisors_that_tick_at_once_requeue_once(lab: Lab) -> None:
    job_id = lab.submit()
    lab.wait_for_step(job_id, EVERY + 1)
    os.kill(lab.rank(job_id, 2).pid, signal.SIGKILL)
    wait_until(lambda: lab.job(job_id)[0] == "FAILED", "the crash")
    ticks = [lab.krea_in_background("supervise", "--once") for _ in range(4)]
    assert [tick.wait(timeout=120) for tick in ticks] == [0] * 4
    lab.krea("supervise", "--once")
    assert lab.job(job_id)[1] == 1
    assert len(lab.incidents()) == 1


def test_without_a_controller_nothing_is_done_and_then_it_carries_on(lab: Lab, slurm_cluster) -> None:
    job_id = lab.submit(step_time=4.0)
    lab.wait_for_step(job_id, 1)
    lab.krea("supervise", "--once")
    time.sleep(3)  # a controller killed within 2 s of a job's start forgets that it runs (22.05.8)
    slurm_cluster.stop_controller()
    try:
        gone_since = time.monotonic()
        while time.monotonic() - gone_since < 20:
            blind = lab.krea("supervise", "--once", check=False)
            assert blind.returncode == 75, blind.stdout + blind.stderr
        assert lab.incidents() == []
    finally:
        slurm_cluster.start_controller()
    seen = lab.krea("supervise", "--once", "--verbose")
    assert "could not see" not in seen.stdout
    assert (lab.job(job_id), lab.run_state()) == (("RUNNING", 0), "ACTIVE")
    os.kill(lab.rank(job_id, 1).pid, signal.SIGKILL)
    wait_until(lambda: lab.job(job_id)[0] == "FAILED", "the crash")
    lab.krea("supervise", "--once")
    assert lab.job(job_id)[1] == 1
    lab.krea("stop", "ddp")


def test_a_history_that_cannot_be_written_stops_the_tick_not_the_run(lab: Lab) -> None:
    if lab.user.name == "root":
        pytest.skip("root writes everywhere: there is no ordinary user on this machine")
    job_id = lab.submit()
    lab.wait_for_step(job_id, EVERY + 1)
    os.kill(lab.rank(job_id, 2).pid, signal.SIGKILL)
    wait_until(lambda: lab.job(job_id)[0] == "FAILED", "the crash")
    history = lab.folder / "state" / "history.db"
    history.chmod(0o400)
    blind = lab.krea("supervise", "--once", check=False)
    assert blind.returncode == 75
    assert "readonly" in blind.stdout + blind.stderr
    assert lab.job(job_id) == ("FAILED", 0)
    assert lab.incidents() == []
    history.chmod(0o600)
    lab.krea("supervise", "--once")
    assert lab.job(job_id)[1] == 1
    assert len(lab.incidents()) == 1
