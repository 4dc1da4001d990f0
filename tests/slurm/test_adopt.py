"""Jobs of other people's scripts, put under supervision on a real Slurm as an ordinary user."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SlurmCluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

# No --requeue of its own, no checkpoints of ours, an odd name: as people have them.
SCRIPT = """#!/bin/bash
#SBATCH --job-name="my job"
#SBATCH --output=out-%x-%j.txt
echo "start ${SLURM_RESTART_COUNT:-0} in $PWD"
echo $$ > pid.${SLURM_RESTART_COUNT:-0}
srun sleep 300
"""


@dataclass
class Desk:
    user: Any
    cluster: SlurmCluster
    folder: Path

    def krea(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        env = {**self.cluster.env, "KREA_RUNNER_STATE_DIR": str(self.folder / "state")}
        argv = [sys.executable, "-m", "krea_runner", *words]
        return self.user.run(argv, env=env, cwd=self.folder, timeout=90, check=check)

    def slurm(self, *argv: str) -> str:
        return self.user.run(list(argv), env=self.cluster.env, cwd=self.folder, timeout=60).stdout.strip()

    def start(self, *options: str) -> str:
        """The id of a job whose script has begun."""
        job_id = self.slurm("sbatch", "--parsable", *options, "their.sh")
        until((self.folder / "pid.0").exists, "the script's start")
        return job_id

    def job(self, job_id: str) -> tuple[str, int]:
        words = self.slurm("squeue", "-h", "-t", "all", "-j", job_id, "-O", "State:|,RestartCnt:|").split("|")
        return words[0], int(words[1])

    def kill(self, restart: int = 0) -> None:
        os.kill(int((self.folder / f"pid.{restart}").read_text()), 9)

    def runs(self) -> list[dict[str, Any]]:
        return json.loads(self.krea("status", "--all", "--json", check=False).stdout)["runs"]

    def incidents(self) -> list[dict[str, Any]]:
        return json.loads(self.krea("history", "--json").stdout)["incidents"]


@pytest.fixture
def desk(slurm_cluster, ordinary_user) -> Iterator[Desk]:
    desk = Desk(ordinary_user, slurm_cluster, Path(ordinary_user.make_dir()))
    (desk.folder / "their.sh").write_text(SCRIPT)
    yield desk
    desk.slurm("scancel", "--me")
    until(lambda: not desk.slurm("squeue", "-h", "--me"), "an empty queue")


def test_an_adopted_job_that_is_killed_is_requeued_and_runs_again(desk: Desk) -> None:
    job_id = desk.start("-N", "2", "-t", "30")
    said = json.loads(desk.krea("adopt", job_id, "--checkpoint-dir", "ckpt", "--json").stdout)
    assert (said["run"], said["nodes"], said["log"]) == ("my job", 2, str(desk.folder / f"out-my job-{job_id}.txt"))
    assert (said["workdir"], said["command"]) == (str(desk.folder), str(desk.folder / "their.sh"))
    assert "adopted, no heartbeats: hangs cannot be seen" in desk.krea("supervise", "--once", "--verbose").stdout
    desk.kill()
    until(lambda: desk.job(job_id)[0] == "FAILED", "the crash")
    desk.krea("supervise", "--once")
    until((desk.folder / "pid.1").exists, "the restart")
    assert desk.job(job_id) == ("RUNNING", 1)
    (incident,) = desk.incidents()
    assert (incident["symptom"], incident["cause"], incident["decision"]) == ("crash", "script_killed", "REQUEUE")
    evidence = json.loads((desk.folder / "runs" / "my-job").parent.joinpath(Path(said["run_dir"]).name, "incidents",
                          f"{job_id}.r0", "evidence.json").read_text())  # fmt: skip
    assert "start 0 in" in evidence["batch_log_tail"]
    # Its script writes no events: a second failure is a crash again, not a start that Slurm refused.
    desk.kill(1)
    until(lambda: desk.job(job_id)[0] == "FAILED", "the second crash")
    desk.krea("supervise", "--once")
    until((desk.folder / "pid.2").exists, "the second restart")
    assert len(desk.incidents()) == 2


def test_an_adopted_job_whose_log_shows_no_more_steps_is_restarted(desk: Desk) -> None:
    script = SCRIPT.replace("srun", "echo ' iteration        7/     100 | consumed samples: 9 |'; srun")
    (desk.folder / "their.sh").write_text(
        script.replace("#SBATCH --output", "#SBATCH --open-mode=append\n#SBATCH --output")
    )
    job_id = desk.start("-t", "30")
    said = desk.krea(
        "adopt", job_id, "--checkpoint-dir", "", "--progress", "megatron", "--progress-budget", "4s", "--dry-run"
    )
    assert "hangs cannot be seen" not in said.stdout
    desk.krea("adopt", job_id, "--checkpoint-dir", "", "--progress", "megatron", "--progress-budget", "4s")
    assert "in progress at step 7" in desk.krea("supervise", "--once", "--verbose").stdout
    shown = desk.krea("status", "my job").stdout
    assert "log pattern: step 7, moved" in shown
    desk.krea("supervise", "--every", "2s", "--for", "14s")
    (incident,) = desk.incidents()
    assert (incident["symptom"], incident["cause"], incident["decision"]) == ("hang", "no_progress", "REQUEUE")
    assert (incident["step"], incident["agreed_by"]) == (7, "2 times the budget has passed")
    until((desk.folder / "pid.1").exists, "the restart")
    assert desk.job(job_id)[1] == 1


def test_a_job_is_adopted_once_and_a_cancelled_one_is_left_alone(desk: Desk) -> None:
    job_id = desk.start()
    desk.krea("adopt", job_id, "--checkpoint-dir", "")
    again = desk.krea("adopt", job_id, "--checkpoint-dir", "")
    assert f"job {job_id} is looked after already: run 'my job', ACTIVE" in again.stdout
    desk.slurm("scancel", job_id)
    until(lambda: desk.job(job_id)[0] == "CANCELLED", "the cancel")
    desk.krea("supervise", "--once")
    (run,) = desk.runs()
    assert (run["state"], desk.job(job_id)) == ("STOPPED", ("CANCELLED", 0))
    ended = desk.krea("adopt", job_id, check=False)
    assert (ended.returncode, "has ended already (CANCELLED)" in ended.stderr) == (69, True)


def test_without_a_terminal_the_flags_to_type_are_named(desk: Desk) -> None:
    job_id = desk.start("-o", "/dev/null")
    asked = desk.krea("adopt", job_id, check=False)
    assert asked.returncode == 2
    assert f"krea-runner adopt {job_id} --log ... --checkpoint-dir ..." in asked.stderr
    assert desk.runs() == []
    dry = desk.krea("adopt", job_id, "--log", "/dev/null", "--checkpoint-dir", "", "--dry-run")
    assert f"would adopt job {job_id} as 'my job'" in dry.stdout
    assert desk.runs() == []


def test_an_array_is_adopted_task_by_task(desk: Desk) -> None:
    job_id = desk.start("--array=1-2", "-o", "slurm-%A_%a.txt")
    whole = desk.krea("adopt", job_id, check=False)
    assert (whole.returncode, f"name one of: {job_id}_" in whole.stderr) == (69, True)
    until((desk.folder / f"slurm-{job_id}_2.txt").exists, "its log")
    task = json.loads(desk.krea("adopt", f"{job_id}_2", "--checkpoint-dir", "", "--json").stdout)
    assert (task["job_id"], task["log"]) == (f"{job_id}_2", str(desk.folder / f"slurm-{job_id}_2.txt"))


def test_an_allocation_without_a_script_is_refused(desk: Desk) -> None:
    shell = desk.user.popen(["srun", "-J", "shell", "sleep", "60"], env=desk.cluster.env)
    until(lambda: desk.slurm("squeue", "-h", "--me", "-t", "R", "-O", "JobID:"), "its start")
    refused = desk.krea("adopt", desk.slurm("squeue", "-h", "--me", "-O", "JobID:"), check=False)
    shell.kill()
    shell.communicate()
    assert (refused.returncode, "has no batch script" in refused.stderr) == (69, True)


def test_somebody_elses_job_is_refused(desk: Desk) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a second user")
    env = {**os.environ, **desk.cluster.env}
    argv = ["sbatch", "--parsable", "-o", "/dev/null", "-D", "/", "--wrap", "sleep 60"]
    job_id = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip()
    try:
        refused = desk.krea("adopt", job_id, check=False)
        assert (refused.returncode, f"job {job_id} is root's" in refused.stderr) == (69, True)
    finally:
        subprocess.run(["scancel", job_id], env=env, check=True)
