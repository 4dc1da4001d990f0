"""Names of any bytes, array tasks, heterogeneous jobs: each is read, requeued, started and cancelled as one job."""

import math
import os
import sys
import time
from pathlib import Path

import pytest

from krea_runner.model import JobState
from krea_runner.schedulers import Placement
from krea_runner.schedulers.slurm_parse import ROW_END, TEXT_END
from tests.conftest import until
from tests.slurm.test_slurm_cli import Lab, lab, said  # noqa: F401

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who sees the jobs of others")
NASTY = "a|b \x1e\nc State=FAILED\x1b[31m" + "x" * 300


def start_again(lab: Lab, job_id: str) -> None:  # noqa: F811
    lab.wait(job_id, JobState.RUNNING)
    time.sleep(1.1)
    lab.slurm.requeue(job_id)
    lab.wait(job_id, JobState.PENDING)
    now = time.time()
    time.sleep(math.floor(now) + 1.15 - now)
    lab.slurm.start_now(job_id)
    assert lab.wait(job_id, JobState.RUNNING).restart_count == 1


def test_a_job_with_a_name_and_a_tag_of_any_bytes_is_read_like_any_other(lab: Lab) -> None:  # noqa: F811
    tag = "krea/t | State=FAILED \x1b[31m"
    job_id = lab.submit("sleep 600", tag=tag)
    said("scontrol", "update", f"jobid={job_id}", f"name={NASTY}")
    job = lab.wait(job_id, JobState.RUNNING)
    assert [found.job_id for found in lab.slurm.find_by_tag(tag)] == [job_id]
    assert lab.slurm.placements([job_id])[job_id].partitions == ("train",)
    lab.slurm.cancel(job_id)
    assert (job.restart_count, lab.wait(job_id, JobState.CANCELLED).job_id) == (0, job_id)


def test_a_task_of_an_array_is_requeued_and_the_others_are_not(lab: Lab) -> None:  # noqa: F811
    array = lab.submit("sleep 600", "--array=0-1", "--requeue")
    start_again(lab, f"{array}_1")
    assert lab.slurm.jobs([f"{array}_0"])[f"{array}_0"].restart_count == 0
    lab.slurm.cancel(f"{array}_1")
    lab.wait(f"{array}_1", JobState.CANCELLED)
    assert lab.slurm.jobs([f"{array}_0"])[f"{array}_0"].state is JobState.RUNNING


def test_a_heterogeneous_job_is_one_job_under_its_leaders_id(lab: Lab, tmp_path: Path) -> None:  # noqa: F811
    script = tmp_path / "het.sbatch"
    script.write_text("#!/bin/sh\n#SBATCH -o /dev/null --requeue -N1\n#SBATCH hetjob\n#SBATCH -N1\nsleep 600\n")
    leader = lab.slurm.submit(script, tag="test")
    start_again(lab, leader)
    assert lab.slurm.jobs([f"{leader}+1"])[f"{leader}+1"].state is JobState.RUNNING
    lab.slurm.cancel(leader)
    until(lambda: lab.slurm.jobs([f"{leader}+1"])[f"{leader}+1"].state is JobState.CANCELLED, "its other half's end")


@as_root
def test_nobody_writes_the_row_of_another_users_job_into_a_name(lab: Lab, ordinary_user, slurm_cluster) -> None:  # noqa: F811
    job_id = lab.submit("sleep 600")
    lab.wait(job_id, JobState.RUNNING)
    row = f"{job_id}|FAILED|9|1792|1796136529|1796136529|1796136529|n1|n1|1|root|None{TEXT_END}x"
    argv = ["sbatch", "--parsable", "-o", "/dev/null", "-J", f"a{TEXT_END}b{ROW_END}\n{row}", "--wrap", "sleep 600"]
    theirs = ordinary_user.run(argv, env=slurm_cluster.env).stdout.strip()
    found = lab.slurm.my_jobs([job_id, theirs])
    assert {found[one].user for one in (job_id, theirs)} == {"root", ordinary_user.name}
    assert (found[job_id].state, found[job_id].restart_count) == (JobState.RUNNING, 0)
    assert found[theirs].comment.startswith(f"b{ROW_END}\n{row}")  # or else the row would have been read as one
    said("scancel", theirs)


@as_root
def test_a_partition_of_any_name_is_read(lab: Lab) -> None:  # noqa: F811
    said("scontrol", "create", "partitionname=a|b ü\x1b", "nodes=n4")
    try:
        job_id = lab.submit("sleep 600", '--partition="a|b ü\x1b"', "--exclude=n3")
        assert lab.slurm.placements([job_id])[job_id] == Placement(("a|b ü\x1b",), ("n3",))
        lab.slurm.cancel(job_id)
        lab.wait(job_id, JobState.CANCELLED)
    finally:
        until(lambda: "a|b" not in said("squeue", "-a", "-h", "-o", "%P"), "the partition to be empty")
        said("scontrol", "delete", "partitionname=a|b ü\x1b")


def test_a_job_whose_name_and_folder_are_no_text_is_adopted_into_a_folder_that_is(ordinary_user, slurm_cluster) -> None:
    home = Path(ordinary_user.make_dir())
    folder = Path(os.fsdecode(bytes(home) + b"/\xff\t\x1b[31m"))
    ordinary_user.run(["mkdir", str(folder)])
    env = {**slurm_cluster.env, "KREA_RUNNER_STATE_DIR": str(home / "state")}
    name = os.fsdecode(b"\xff\xfe\x1b[31m\n|")
    argv = ["sbatch", "--parsable", "-J", name, "-D", str(folder), "-o", "/dev/null", "--wrap", "sleep 600"]
    job_id = ordinary_user.run(argv, env=env).stdout.strip()
    adopt = [sys.executable, "-m", "krea_runner", "adopt", job_id, "--checkpoint-dir", "", "--log", "/dev/null"]
    refused = ordinary_user.run(adopt, env=env, check=False)
    assert (refused.returncode, "--run-dir DIR" in refused.stderr, "\x1b" in refused.stderr) == (78, True, False)
    assert [path.name for path in home.iterdir()] == [folder.name]
    taken = ordinary_user.run([*adopt, "--run-dir", str(home / "run")], env=env)
    assert "\x1b" not in taken.stdout
    ordinary_user.run([sys.executable, "-m", "krea_runner", "supervise", "--once"], env=env)
    shown = ordinary_user.run([sys.executable, "-m", "krea_runner", "status"], env=env).stdout
    assert (f"job-{job_id}" in shown, "ACTIVE" in shown, "\x1b" in shown) == (True, True, False)
    ordinary_user.run(["scancel", job_id], env=env)
