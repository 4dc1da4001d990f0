"""A bug in the training script on a real Slurm: what the supervisor makes of it, and where Slurm says the ranks were."""

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from krea_runner.schedulers import slurm_layout
from tests.chaos.test_diagnosed_runs import BUG
from tests.conftest import SlurmCluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


def test_a_bug_is_held_and_slurm_tells_where_the_ranks_were(
    slurm_accounting_cluster: SlurmCluster, ordinary_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, folder = slurm_accounting_cluster, ordinary_user.make_dir()
    env = {**cluster.env, "KREA_RUNNER_STATE_DIR": str(folder / "state")}

    def krea(*words: str) -> Any:
        argv = [sys.executable, "-m", "krea_runner", *words]
        done = ordinary_user.run(argv, env=env, cwd=folder, timeout=120)
        return json.loads(done.stdout) if "--json" in words else done.stdout

    (folder / "train.py").write_text(BUG)
    (folder / "run.toml").write_text(
        textwrap.dedent(f"""
        [run]
        name = "bug"
        command = {json.dumps([sys.executable, "train.py"])}
        dir = "run"
        [gang]
        nodes = 2
        ranks_per_node = 2
        """)
    )
    job_id = krea("submit", "run.toml", "--json", "--no-check")["job_id"]
    everything = {**os.environ, **env}

    def state() -> str:
        argv = ["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T"]
        return subprocess.run(argv, env=everything, capture_output=True, text=True, check=False).stdout.strip()

    until(lambda: state() == "FAILED", "the end of the job")
    krea("supervise", "--once")
    (incident,) = krea("history", "--json")["incidents"]
    assert (incident["symptom"], incident["cause"], incident["decision"]) == ("crash", "rank_failed", "HOLD"), incident
    assert (incident["diagnosis"]["cause"], incident["diagnosis"]["everywhere"]) == ("user_exception", True)
    assert incident["diagnosis"]["first"].startswith(f"logs/{job_id}.r0/node-")

    # The same by the job's id alone, from one node's log, and once Slurm has forgotten the job.
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    log = folder / "run" / "logs" / f"{job_id}.r0" / "node-1.log"
    told = krea("diagnose", "--jobid", job_id, str(log), "--json")
    assert told["first_evidence"]["rank"] in {2, 3}
    assert told["first_evidence"]["node"] == _nodes(everything, job_id)[1]
    wanted = slurm_layout.job_document(job_id)
    assert wanted == {
        "job_id": job_id, "nodes": _nodes(everything, job_id), "still_running": False, "launcher": "srun", "world_size": 4,
        "tasks_per_node": 2, "gpus_per_node": 2,
    }  # fmt: skip
    monkeypatch.setattr(slurm_layout, "_of_queue", lambda _job_id: (0, 0, "", ""))
    until(lambda: slurm_layout.job_document(job_id) == wanted, "accounting")


def test_of_any_job_its_id_is_enough(slurm_accounting_cluster: SlurmCluster, ordinary_user: Any) -> None:
    """Neither our script nor a run of ours."""
    folder = ordinary_user.make_dir()
    env = {**slurm_accounting_cluster.env, "KREA_RUNNER_STATE_DIR": str(folder / "state")}
    (folder / "train.py").write_text(BUG)
    (folder / "job.sh").write_text(f"#!/bin/bash\nsrun -l {sys.executable} train.py\n")
    submitted = ordinary_user.run(["sbatch", "--parsable", "-N2", "--ntasks-per-node=2", "job.sh"], env=env, cwd=folder)
    job_id = submitted.stdout.strip()

    def state() -> str:
        return ordinary_user.run(["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T"], env=env).stdout.strip()

    until(lambda: state() == "FAILED", "the end of the job")
    argv = [sys.executable, "-m", "krea_runner", "diagnose", "--jobid", job_id, "--json"]
    told = json.loads(ordinary_user.run(argv, env=env, cwd=folder).stdout)
    log = (folder / f"slurm-{job_id}.out").read_text()
    assert (told["cause"], told["everywhere"]) == ("user_exception", True), f"{told}\n{log}"
    assert told["first_evidence"]["file"] == str(folder / f"slurm-{job_id}.out")


def _nodes(env: dict[str, str], job_id: str) -> list[str]:
    argv = ["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%N"]
    folded = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()
    return subprocess.run(
        ["scontrol", "show", "hostnames", folded], env=env, capture_output=True, text=True, check=True
    ).stdout.split()
