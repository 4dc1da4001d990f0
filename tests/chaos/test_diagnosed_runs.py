"""Whole runs on the local scheduler that fail for a reason that only their logs tell: the supervisor finds it and acts on it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from krea_runner.history.store import open_history
from krea_runner.model import Diagnosis, Incident, JobState, RunState
from krea_runner.schedulers.local import LocalScheduler
from tests.conftest import until

KREA = [sys.executable, "-m", "krea_runner"]

# Every rank runs into the same line; each is given the time to say so before srun ends the others.
BUG = """
import sys, time, traceback
print("step 10 | loss 2.7 | 1.75 s/it", flush=True)
try:
    {}["mmlu_stem"]
except KeyError:
    traceback.print_exc()
    sys.stderr.flush()
    time.sleep(1.5)
    sys.exit(1)
"""

# torch 2.6 and newer: three of four ranks report the collective, rank 2 is stuck somewhere else.
TIMEOUT = """
import os, sys, time
rank = int(os.environ["SLURM_PROCID"])
if rank == 2:
    time.sleep(600)
sys.stderr.write(
    f"[rank{rank}]:[E802 13:21:12.512781555 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=7, NumelOut=7, Timeout(ms)=600000) ran for 600018 milliseconds "
    "before timing out.\\n"
)
sys.stderr.flush()
time.sleep(1.5)
os.abort()
"""


def first_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> tuple[Incident, Diagnosis, RunState]:
    monkeypatch.setenv("KREA_RUNNER_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "told"\nscheduler = "local"\ndir = "run"\ncommand = {json.dumps([sys.executable, "train.py"])}\n'
        "[gang]\nnodes = 2\nranks_per_node = 2\n"
    )
    subprocess.run([*KREA, "submit", "run.toml", "--no-check"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    scheduler, history = LocalScheduler(tmp_path / "state" / "local"), open_history(tmp_path / "state")
    try:
        until(lambda: scheduler.jobs(["1"])["1"].state is JobState.FAILED, "the crash")
        subprocess.run([*KREA, "supervise", "--once"], check=True)
        (incident,), (run,) = history.incidents(), history.list_runs()
    finally:
        subprocess.run([*KREA, "stop", "told"], check=False, capture_output=True)
        subprocess.run([*KREA, "supervise", "--once"], check=False, capture_output=True)
    assert incident.finding.diagnosis is not None
    return incident, incident.finding.diagnosis, run.state


def test_a_bug_that_every_rank_runs_into_is_held_for_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incident, diagnosis, state = first_incident(tmp_path, monkeypatch, BUG)
    assert (incident.finding.symptom, incident.finding.cause) == ("crash", "rank_failed")
    assert (diagnosis.cause, diagnosis.everywhere, diagnosis.is_sure) == ("user_exception", True, True)
    assert diagnosis.first.endswith("KeyError: 'mmlu_stem'")
    assert (incident.decision.kind, state) == ("HOLD", RunState.HELD)
    shown = subprocess.run([*KREA, "history"], capture_output=True, text=True, check=True).stdout
    assert "user_exception" in shown
    assert "the training code raised an exception: logs/1.r0/node-" in shown


def test_the_rank_that_never_came_to_a_collective_is_the_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident, diagnosis, state = first_incident(tmp_path, monkeypatch, TIMEOUT)
    assert (diagnosis.cause, diagnosis.ranks) == ("nccl_timeout", (2,))
    assert ("rank", "2") in [(suspect.kind, suspect.name) for suspect in incident.finding.suspects]
    assert (incident.decision.kind, state) == ("REQUEUE", RunState.ACTIVE)
