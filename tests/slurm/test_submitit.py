"""Python functions as supervised runs on a real Slurm without accounting, as an ordinary user."""

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

from tests.conftest import SlurmCluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

WORK = """
import json, os, time
import krea_runner
from submitit.helpers import Checkpointable

class Count(Checkpointable):
    def __init__(self, save):
        self.step, self.save = 0, save

    def __call__(self, until):
        beat = krea_runner.Heartbeat()
        while self.step < until:
            self.step += 1
            beat.step(self.step)
            with open("trace", "a") as trace:
                trace.write(json.dumps([os.environ.get("SLURM_RESTART_COUNT", "0"), self.step, os.getpid()]) + "\\n")
            if self.save:
                krea_runner.save_checkpoint(self, until)
            time.sleep(0.1)
        return self.step

def where(factor):
    return [int(os.environ["SLURM_PROCID"]) * factor, os.environ["SLURM_NODEID"]]

def fail(word):
    raise ValueError(f"no {word}")
"""


@dataclass
class Desk:
    user: Any
    cluster: SlurmCluster
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {**self.cluster.env, "KREA_RUNNER_STATE_DIR": str(self.folder / "state"), "SUBMITIT_LOG_LEVEL": "ERROR"}

    def python(self, code: str) -> Any:
        """What `code` prints as JSON; `job(*where)` is there to find a job of an earlier call."""
        before = (
            "import json, krea_runner, work\njob = lambda folder, id, n=1: krea_runner.KreaJob(folder, id, range(n))\n"
        )
        argv = [sys.executable, "-c", before + textwrap.dedent(code)]
        return json.loads(self.user.run(argv, env=self.env, cwd=self.folder, timeout=90).stdout)

    def submit(self, call: str, **spec: Any) -> list[str]:
        """Folder and job id."""
        return self.python(f"""
            job = krea_runner.submit({call}, spec={spec!r})
            print(json.dumps([str(job.paths.folder), job.job_id]))
        """)

    def krea(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.user.run([sys.executable, "-m", "krea_runner", *words], env=self.env, cwd=self.folder, timeout=90)

    def job(self, job_id: str) -> tuple[str, int]:
        argv = ["squeue", "-h", "-t", "all", "-j", job_id, "-O", "State:|,RestartCnt:|"]
        words = self.user.run(argv, env=self.env).stdout.strip().split("|")
        return words[0], int(words[1])

    def trace(self) -> list[tuple[int, int, int]]:
        path = self.folder / "trace"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(restart), step, pid) for restart, step, pid in map(json.loads, lines)]


@pytest.fixture
def desk(slurm_cluster, ordinary_user) -> Iterator[Desk]:
    desk = Desk(ordinary_user, slurm_cluster, Path(ordinary_user.make_dir()))
    (desk.folder / "work.py").write_text(WORK)
    yield desk
    desk.user.run(["scancel", "--me"], env=desk.env)
    until(lambda: not desk.user.run(["squeue", "-h", "--me"], env=desk.env).stdout.strip(), "an empty queue")


def test_every_ranks_result_comes_back_without_accounting(desk: Desk) -> None:
    where = desk.submit("work.where, 10", gang={"nodes": 2, "ranks_per_node": 2})
    assert desk.python(f"print(json.dumps(job(*{where}, 4).results()))") == [[0, "0"], [10, "0"], [20, "1"], [30, "1"]]


def test_an_exception_comes_back_once_nothing_will_restart_the_function(desk: Desk) -> None:
    where = desk.submit("work.fail, 'luck'", policy={"max_restarts": 0})
    until(lambda: desk.job(where[1])[0] == "FAILED", "the exception")
    assert desk.python(f"print(json.dumps(job(*{where}).done(True)))") is False
    desk.krea("supervise", "--once")
    said = desk.python(f"print(json.dumps([job(*{where}).run().state, str(job(*{where}).exception())]))")
    assert said[0] == "HELD"
    assert "ValueError: no luck" in said[1]


def test_a_killed_function_goes_on_from_the_state_that_it_saved(desk: Desk) -> None:
    where = desk.submit("work.Count(save=True), 60")
    until(lambda: len(desk.trace()) >= 5, "five steps")
    os.kill(desk.trace()[-1][2], signal.SIGKILL)
    until(lambda: desk.job(where[1])[0] == "FAILED", "the crash")
    died_at = desk.trace()[-1][1]
    desk.krea("supervise", "--once")
    assert desk.python(f"print(json.dumps(job(*{where}).result()))") == 60
    steps_after = [step for restart, step, _ in desk.trace() if restart == 1]
    assert desk.job(where[1])[1] == 1
    assert steps_after[0] in {died_at, died_at + 1}


def test_submitits_signal_saves_the_state_and_leaves_the_requeue_to_the_supervisor(desk: Desk) -> None:
    folder, job_id = desk.submit("work.Count(save=False), 60")
    until(lambda: len(desk.trace()) >= 5, "five steps")
    started = (Path(folder) / f"{job_id}_submitted.pkl").stat().st_ino
    desk.user.run(["scancel", "--signal=USR2", job_id], env=desk.env)
    until(lambda: (Path(folder) / f"{job_id}_submitted.pkl").stat().st_ino != started, "the checkpoint")
    saved_at = desk.trace()[-1][1]
    assert desk.job(job_id) == ("RUNNING", 0)
    os.kill(desk.trace()[-1][2], signal.SIGKILL)
    until(lambda: desk.job(job_id)[0] == "FAILED", "the crash")
    desk.krea("supervise", "--once")
    assert desk.python(f"print(json.dumps(job({folder!r}, {job_id!r}).result()))") == 60
    assert next(step for restart, step, _ in desk.trace() if restart == 1) == saved_at + 1


def test_a_hung_function_goes_on_where_it_stopped(desk: Desk) -> None:
    desk.submit("work.Count(save=False), 6000", budgets={"step": "4s"})
    until(lambda: len(desk.trace()) >= 5, "five steps")
    os.kill(desk.trace()[-1][2], signal.SIGSTOP)
    watching = desk.user.popen(
        [sys.executable, "-m", "krea_runner", "supervise", "--every", "2s", "--for", "100s"],
        env=desk.env,
        cwd=desk.folder,
    )
    try:
        until(lambda: any(restart == 1 for restart, _, _ in desk.trace()), "its restart", 100)
    finally:
        watching.kill()
        watching.communicate()
    before = [step for restart, step, _ in desk.trace() if restart == 0]
    assert next(step for restart, step, _ in desk.trace() if restart == 1) == before[-1] + 1
    (incident,) = json.loads(desk.krea("history", "--json").stdout)["incidents"]
    assert (incident["symptom"], incident["decision"]) == ("hang", "REQUEUE")


def test_a_requeue_by_hand_lets_the_function_save_its_state(desk: Desk) -> None:
    _, job_id = desk.submit("work.Count(save=False), 6000")
    until(lambda: len(desk.trace()) >= 5, "five steps")
    desk.krea("supervise", "--once")
    desk.user.run(["scontrol", "requeue", job_id], env=desk.env)
    until(lambda: desk.job(job_id) == ("PENDING", 1), "the queue")
    time.sleep(1.2)  # a start in the same whole second as the kill is refused
    desk.user.run(["scontrol", "update", f"jobid={job_id}", "StartTime=now"], env=desk.env)
    last = desk.trace()[-1][1]
    until(lambda: any(restart == 1 for restart, _, _ in desk.trace()), "its restart", 150)
    assert [step for restart, step, _ in desk.trace() if restart == 1][:1] == [last + 1]
