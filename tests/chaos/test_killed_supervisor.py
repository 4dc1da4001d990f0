"""The supervisor is killed with SIGKILL again and again while it deals with a crash: nothing is lost, nothing done twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from krea_runner.history.store import open_history
from krea_runner.model import ActionStage, JobState, RunState
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.schedulers.local import LocalScheduler
from tests.conftest import until

KILLS = 12
KREA = [sys.executable, "-m", "krea_runner"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.timeout(180)
def test_a_supervisor_killed_anywhere_requeues_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("KREA_RUNNER_STATE_DIR", str(tmp_path / "state"))
    train = [
        sys.executable,
        "-m",
        "krea_runner.demo.train",
        "--steps",
        "40",
        "--checkpoint-every",
        "5",
        "--step-time",
        "0.1",
    ]
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "chaos"\nscheduler = "local"\ndir = "run"\ncommand = {json.dumps(train)}\n'
        '[gang]\nnodes = 2\nranks_per_node = 2\n[checkpoint]\ndir = "ckpt"\n'
    )
    subprocess.run([*KREA, "submit", "run.toml"], cwd=tmp_path, check=True)
    scheduler, history = LocalScheduler(tmp_path / "state" / "local"), open_history(tmp_path / "state")

    def beats():
        return read_heartbeats(tmp_path / "run" / "heartbeats" / "1.r0", "1.r0").ranks

    until(lambda: len(beats()) == 4 and beats()[0].step >= 7, "a few steps")
    os.kill(beats()[2].pid, signal.SIGKILL)
    until(lambda: scheduler.jobs(["1"])["1"].state is JobState.FAILED, "the crash")

    draw = random.Random(seed)
    for _ in range(KILLS):
        tick = subprocess.Popen([*KREA, "supervise", "--once"], stdout=subprocess.DEVNULL)
        time.sleep(
            draw.uniform(0.2, 0.7)
        )  # start-up takes 0.3 s: some die before they look, some in the middle, some after
        tick.kill()
        tick.wait()
    subprocess.run([*KREA, "supervise", "--once"], check=True)
    until(lambda: scheduler.jobs(["1"])["1"].state is JobState.COMPLETED, "the end")
    subprocess.run([*KREA, "supervise", "--once"], check=True)

    (run,) = history.list_runs()
    assert run.state is RunState.DONE
    assert scheduler.jobs(["1"])["1"].restart_count == 1
    assert len(history.incidents()) == 1
    assert [action.stage for action in history.actions(run.run_id)] == [ActionStage.DONE]
