"""Job names of any bytes, array tasks, heterogeneous jobs: each is read, requeued, started and cancelled as one job."""

import math
import time
from pathlib import Path

import pytest

from krea_runner.model import JobState
from tests.conftest import until
from tests.slurm.test_slurm_cli import Lab, lab, said  # noqa: F401

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
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
    assert lab.slurm.placement(job_id).partitions == ("train",)
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
