"""The batch script on a real Slurm, as an ordinary user: what sbatch reads, what srun does with it, what is recorded."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from krea_runner.launch.render import sbatch_line
from krea_runner.model import AttemptKey
from krea_runner.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

PREPARE = """
import sys
from pathlib import Path
from krea_runner.config import load_run
from krea_runner.launch.submit import prepare
print(prepare(load_run(Path(sys.argv[1])), Path(sys.argv[1])))
"""


@dataclasses.dataclass
class Desk:
    """One user's folder with a run.toml, and the cluster."""

    user: Any
    env: dict[str, str]
    folder: Path

    def slurm(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.user.run(list(argv), env=self.env, cwd="/", timeout=90, check=check)

    def prepare(self, command: Any, *, more: str = "") -> Path:
        """run.toml of 2 nodes x 2 ranks in `folder`, made into a run directory `run` by the user; the script."""
        run = f'[run]\nname = "a test"\ncommand = {json.dumps(command)}\ndir = "run"\n{more}\n'
        toml = run + "[gang]\nnodes = 2\nranks_per_node = 2\n"
        (self.folder / "run.toml").write_text(toml)
        argv = [sys.executable, "-c", PREPARE, str(self.folder / "run.toml")]
        return Path(self.user.run(argv, env=self.env, cwd="/", timeout=60).stdout.strip())

    def run_to_end(self, script: Path) -> str:
        """The id of the job, which has ended."""
        return self.wait_end(self.slurm("sbatch", "--parsable", str(script)).stdout.strip())

    def wait_end(self, job_id: str) -> str:
        self.wait_state(job_id, "COMPLETED", "FAILED", "CANCELLED")
        return job_id

    def wait_state(self, job_id: str, *states: str) -> None:
        deadline = time.monotonic() + 60
        while (state := self.state(job_id)) not in states:
            assert time.monotonic() < deadline, f"job {job_id} is {state}, waited for {states}"
            time.sleep(0.1)

    def state(self, job_id: str) -> str:
        return self.slurm("squeue", "-h", "-t", "all", "-j", job_id, "-O", "State:20").stdout.strip()

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / "run")

    def events(self, job_id: str) -> list[dict[str, Any]]:
        path = self.run_dir.script_events(AttemptKey(job_id))
        return [json.loads(line) for line in path.read_text().splitlines()]

    def exit_codes(self, job_id: str) -> tuple[int, int]:
        """As Slurm has it, and as the script has it."""
        raw = self.slurm("squeue", "-h", "-t", "all", "-j", job_id, "-O", "exit_code:20").stdout.strip()
        code, colon, _ = raw.partition(":")  # 22.05 gives what wait(2) does, later ones code and signal
        return int(code) if colon else int(code) >> 8, self.events(job_id)[-1]["exit_code"]

    def node_log(self, job_id: str, node: int) -> str:
        return (self.run_dir.attempt_logs(AttemptKey(job_id)) / f"node-{node}.log").read_text()


@pytest.fixture
def desk(slurm_cluster, ordinary_user) -> Desk:
    return Desk(ordinary_user, slurm_cluster.env, ordinary_user.make_dir())


def test_a_gang_runs_and_its_events_are_on_record(desk: Desk) -> None:
    job_id = desk.run_to_end(
        desk.prepare(["bash", "-c", "echo $SLURM_NODEID $KREA_ATTEMPT $WORLD_SIZE; echo oops >&2"])
    )
    start, end = desk.events(job_id)
    assert (start["event"], start["attempt"], start["restart_count"]) == ("attempt_start", f"{job_id}.r0", 0)
    assert start["nodelist"].startswith("n[")
    assert (end["event"], end["attempt"]) == ("attempt_end", f"{job_id}.r0")
    assert desk.exit_codes(job_id) == (0, 0)
    for node in (0, 1):
        ranks = (2 * node, 2 * node + 1)
        wanted = [line for rank in ranks for line in (f"{rank}: {node} {job_id}.r0 4", f"{rank}: oops")]
        assert sorted(desk.node_log(job_id, node).splitlines()) == sorted(wanted)
    assert f"attempt {job_id}.r0 on n[" in desk.run_dir.batch_log(job_id).read_text()


@pytest.mark.parametrize(
    "name",
    ["two words", "50%", "%j", "%%n a%t%%", "it's", 'a "b" c', "$(touch CANARY) `id`", "学習 # ; & (x)", "~{a}*?"],
)
def test_any_folder_name_works_and_is_not_executed(desk: Desk, name: str) -> None:
    desk.folder = desk.folder / name
    desk.user.run(["mkdir", str(desk.folder)])
    desk.user.run(["touch", str(desk.folder / "run.toml")])
    job_id = desk.run_to_end(desk.prepare(["pwd"]))
    assert desk.exit_codes(job_id) == (0, 0)
    assert desk.node_log(job_id, 0).splitlines()[0].endswith(f": {desk.folder}")
    assert desk.run_dir.batch_log(job_id).exists()
    assert list(desk.folder.parent.rglob("CANARY")) == []


def test_a_workdir_may_hold_backslashes_and_percent_signs(desk: Desk) -> None:
    workdir = desk.folder / 'a%j%n \\ "q"'
    desk.user.run(["mkdir", str(workdir)])
    job_id = desk.run_to_end(desk.prepare(["pwd"], more=f"workdir = {json.dumps(str(workdir))}"))
    assert desk.node_log(job_id, 0).splitlines()[0].endswith(f": {workdir}")


def test_sbatch_reads_our_quoting_as_meant(desk: Desk) -> None:
    script = desk.folder / "quoted.sbatch"
    for value in [
        "a b",
        "it's",
        "a # b",
        'a"b',
        "a\\b",
        "\\",
        " lead and trail ",
        "$(id) `id`",
        "学習",
        "(a|b)&!;<>",
        "{a}~*?^",
    ]:
        script.write_text(
            f"#!/bin/bash\n#SBATCH --hold --output=/dev/null\n#SBATCH {sbatch_line(f'--comment={value}')}\n"
        )
        job_id = desk.slurm("sbatch", "--parsable", str(script)).stdout.strip()
        seen = desk.slurm("squeue", "-h", "-j", job_id, "-O", "Comment:|").stdout
        desk.slurm("scancel", job_id)
        assert seen.rstrip("\n") == f"{value}|"


def test_words_arrive_at_the_ranks_as_they_were(desk: Desk) -> None:
    words = ["a b", "it's", '"', "$(id)", "`id`", "%n", "\\", "", "*", "-x", "--label", ":", ";", "a\nb", "学"]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    job_id = desk.run_to_end(desk.prepare(["/usr/bin/env", "python3", "-c", code, *words]))
    assert json.loads(desk.node_log(job_id, 1).splitlines()[0].split(": ", 1)[1]) == words


@pytest.mark.parametrize(("line", "code"), [("exit 93", 93), ("kill -SEGV $$", 139), ("exec /no/such/program", 127)])
def test_the_exit_code_of_the_ranks_is_slurms_and_ours(desk: Desk, line: str, code: int) -> None:
    assert desk.exit_codes(desk.run_to_end(desk.prepare(line))) == (code, code)


def test_a_missing_workdir_is_78_where_slurm_would_complete(desk: Desk) -> None:
    job_id = desk.run_to_end(desk.prepare(["true"], more='workdir = "gone"'))
    assert desk.exit_codes(job_id) == (78, 78)
    assert f"krea_runner: cannot enter {desk.folder}/gone" in desk.run_dir.batch_log(job_id).read_text()


def test_ranks_that_never_started_for_want_of_a_log_are_a_failure(desk: Desk) -> None:
    """srun exits 0 then (22.05.8): the run would be called done."""
    job_id = desk.slurm("sbatch", "--parsable", "--hold", str(desk.prepare(["true"]))).stdout.strip()
    desk.user.run(["mkdir", "-m", "555", str(desk.run_dir.attempt_logs(AttemptKey(job_id)))])
    desk.slurm("scontrol", "release", job_id)
    desk.wait_end(job_id)
    assert desk.exit_codes(job_id) == (1, 1)
    # 26.05 says it itself, and exits 1.
    assert re.search("its ranks were not started|task 0 launch failed", desk.run_dir.batch_log(job_id).read_text())


def test_a_requeue_of_ranks_that_ignore_it_neither_hangs_nor_reads_as_success(desk: Desk) -> None:
    """srun gives up waiting for such ranks and exits 0 (22.05.8)."""
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(120)"
    )
    job_id = desk.slurm("sbatch", "--parsable", str(desk.prepare(["python3", "-c", code]))).stdout.strip()
    logs = [desk.run_dir.attempt_logs(AttemptKey(job_id)) / f"node-{node}.log" for node in (0, 1)]
    deadline = time.monotonic() + 60
    while not all(log.exists() and log.read_text().count("up") == 2 for log in logs):
        assert time.monotonic() < deadline, "the ranks did not come up"
        time.sleep(0.1)
    desk.slurm("scontrol", "requeue", job_id)
    desk.wait_state(job_id, "PENDING")
    desk.slurm("scancel", job_id)
    ends = [event for event in desk.events(job_id) if event["event"] == "attempt_end"]
    assert [event for event in ends if event["exit_code"] == 0] == []
