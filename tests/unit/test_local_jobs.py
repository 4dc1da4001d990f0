"""What is the local scheduler's own, beyond the contract: its shepherds, its srun, its files."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from krea_runner.errors import SchedulerError, SchedulerOutputError
from krea_runner.model import JobState
from krea_runner.schedulers.local import LocalScheduler
from krea_runner.schedulers.local_state import load, locked, marked, save
from tests.conftest import until


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.scheduler = folder, LocalScheduler(folder / "local")

    def submit(self, body: str, *options: str, nodes: int = 1, tasks: int = 1) -> str:
        script = self.folder / "script"
        lines = [
            f"--nodes={nodes}",
            f"--ntasks-per-node={tasks}",
            f"--output={self.folder}/out",
            "--open-mode=append",
            *options,
        ]
        script.write_text("#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + body + "\n")
        return self.scheduler.submit(script, tag="t")

    def state(self, job_id: str) -> JobState:
        return self.scheduler.jobs([job_id])[job_id].state

    def wait(self, job_id: str, *states: JobState) -> None:
        until(lambda: self.state(job_id) in states, f"{states}", 30)

    def job(self, job_id: str):
        return load(self.scheduler.root / "jobs" / job_id)

    @property
    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    jobs = bench.scheduler.root / "jobs"
    for home in jobs.iterdir() if jobs.exists() else ():
        bench.scheduler.cancel(home.name)
        until(lambda home=home: bench.state(home.name).is_ended, "the end")
        assert marked(load(home).marker) == []


def test_a_job_without_its_shepherd_is_a_node_failure_and_nothing_of_it_is_left(bench: Bench) -> None:
    job_id = bench.submit("srun sleep 600", nodes=2, tasks=2)
    until(lambda: len(marked(bench.job(job_id).marker)) >= 5, "the ranks")
    os.kill(int(bench.job(job_id).shepherd[0]), signal.SIGKILL)
    until(lambda: bench.state(job_id) is JobState.NODE_FAIL, "the burial")
    assert marked(bench.job(job_id).marker) == []
    bench.scheduler.requeue(job_id)
    bench.scheduler.start_now(job_id)
    bench.wait(job_id, JobState.RUNNING)
    assert bench.scheduler.jobs([job_id])[job_id].restart_count == 1


def test_of_many_requeues_at_once_one_takes_effect(bench: Bench) -> None:
    job_id = bench.submit("srun sleep 600")
    bench.wait(job_id, JobState.RUNNING)
    code = (
        "import sys; from pathlib import Path; from krea_runner.schedulers.local import LocalScheduler\n"
        f"LocalScheduler(Path({str(bench.scheduler.root)!r})).requeue({job_id!r})"
    )
    tries = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) for _ in range(5)]
    assert sorted(process.wait(timeout=60) for process in tries) == [0, 1, 1, 1, 1]
    bench.wait(job_id, JobState.PENDING)
    assert bench.scheduler.jobs([job_id])[job_id].restart_count == 1


def test_the_time_limit_ends_a_job(bench: Bench) -> None:
    job_id = bench.submit("srun sleep 600", "--time=0:01")
    bench.wait(job_id, JobState.TIMEOUT)


@pytest.mark.parametrize("line", ["--frobnicate=1", "-Z 3", "--nodes=none", "--nodes=0"])
def test_an_option_that_cannot_be_read_is_refused_by_name(bench: Bench, line: str) -> None:
    with pytest.raises(SchedulerError, match=re.escape(re.split("[= ]", line.lstrip("-"))[0])):
        bench.submit("true", line)


def test_a_damaged_record_is_an_error_that_names_the_file(bench: Bench) -> None:
    job_id = bench.submit("true")
    bench.wait(job_id, JobState.COMPLETED)
    path = bench.scheduler.root / "jobs" / job_id / "job.json"
    whole = path.read_text()
    for damage in ("", "{", "[]", '{"job_id": "1"}'):
        path.write_text(damage)
        with pytest.raises(SchedulerOutputError, match=r"job\.json"):
            bench.scheduler.jobs([job_id])
    path.write_text(whole)


def test_a_job_that_waits_or_sleeps_uses_no_cpu(bench: Bench) -> None:
    job_id = bench.submit("sleep 600")
    bench.wait(job_id, JobState.RUNNING)
    bench.scheduler.requeue(job_id)
    bench.wait(job_id, JobState.PENDING)
    pid = bench.job(job_id).shepherd[0]

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))

    before = ticks()
    time.sleep(1.5)
    assert ticks() == before


def test_a_cancel_ends_stopped_processes_too(bench: Bench) -> None:
    job_id = bench.submit("srun sleep 600", nodes=2)
    until(lambda: len(marked(bench.job(job_id).marker)) >= 3, "the ranks")
    for pid in marked(bench.job(job_id).marker):
        os.kill(pid, signal.SIGSTOP)
    bench.scheduler.cancel(job_id)
    bench.wait(job_id, JobState.CANCELLED)
    assert marked(bench.job(job_id).marker) == []


def test_a_huge_line_and_binary_output_pass_whole(bench: Bench) -> None:
    program = r"import sys; sys.stdout.buffer.write(b'x' * 3_000_000 + b'\n\xff\x00\n'); print('end')"
    job_id = bench.submit(f'srun --output={bench.folder}/rank-%t.log {sys.executable} -c "{program}"')
    bench.wait(job_id, JobState.COMPLETED)
    written = (bench.folder / "rank-0.log").read_bytes()
    assert written.count(b"x") == 3_000_000
    assert written.endswith(b"\xff\x00\nend\n")


@pytest.mark.parametrize(
    ("how", "word", "code"),
    [
        ("exit 5", "Exited with exit code 5", 5),
        ("kill -KILL $$", "Killed", 137),
        ("kill -SEGV $$", "Segmentation fault", 139),
    ],
)
def test_srun_names_the_task_its_node_and_its_end(bench: Bench, how: str, word: str, code: int) -> None:
    job_id = bench.submit(f"srun bash -c 'if [ $SLURM_PROCID = 3 ]; then {how}; fi'", nodes=2, tasks=2)
    bench.wait(job_id, JobState.FAILED)
    assert f"srun: error: local2: task 3: {word}" in bench.output
    assert bench.scheduler.jobs([job_id])[job_id].exit_code == code


def test_srun_refuses_what_it_does_not_know(bench: Bench) -> None:
    job_id = bench.submit("srun --frobnicate true")
    bench.wait(job_id, JobState.FAILED)
    assert "--frobnicate" in bench.output


def test_a_missing_program_is_a_failure_that_says_so(bench: Bench) -> None:
    job_id = bench.submit("srun /no/such/program")
    bench.wait(job_id, JobState.FAILED)
    assert "/no/such/program" in bench.output


def test_a_waiting_job_whose_shepherd_is_gone_gets_another(bench: Bench) -> None:
    """A requeue whose caller was killed before it could start one: found by killing supervisors at each of their points."""
    job_id = bench.submit("exit 1")
    bench.wait(job_id, JobState.FAILED)
    with locked(home := bench.scheduler.root / "jobs" / job_id):
        job = load(home)
        job.back_to_queue(time.time() + 600)
        job.restart_count, job.submitted_at = 1, time.time() - 3600
        save(home, job)
    assert bench.state(job_id) is JobState.PENDING
    until(lambda: bench.job(job_id).shepherd, "another shepherd")
    bench.scheduler.start_now(job_id)
    bench.wait(job_id, JobState.FAILED)
    assert bench.job(job_id).restart_count == 1
