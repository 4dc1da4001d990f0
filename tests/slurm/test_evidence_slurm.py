"""Evidence of a hang, collected by a second step beside the hung one, on a real Slurm."""

import json
import os
import shutil
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from krea_runner.schedulers.slurm_cli import SlurmCli
from tests.slurm.test_survive import Lab, wait_until

WORLD = 8  # on four nodes
TRAIN = """
import os, sys, time
from krea_runner.heartbeat import Heartbeat

def all_reduce():
    while True:
        time.sleep(1)

def next_batch():
    while True:
        time.sleep(1)

heartbeat = Heartbeat()
for step in range(5):
    heartbeat.step(step)
    time.sleep(0.1)
if int(os.environ.get("SLURM_RESTART_COUNT", "0")):
    sys.exit(0)
next_batch() if os.environ["SLURM_PROCID"] == "3" else all_reduce()
"""


@pytest.fixture
def lab(slurm_cluster, ordinary_user) -> Iterator[Lab]:
    if shutil.which("py-spy") is None and not (Path(os.sys.executable).with_name("py-spy")).exists():
        pytest.skip("py-spy is not installed: pip install 'krea-runner[stacks]'")
    folder = Path(ordinary_user.make_dir())
    lab = Lab(ordinary_user, {**slurm_cluster.env, "KREA_RUNNER_STATE_DIR": str(folder / "state")}, folder)
    yield lab
    ordinary_user.run(["scancel", "--me"], env=lab.env, timeout=60)
    wait_until(lambda: not lab.slurm("squeue", "-h", "--me").strip(), "an empty queue")


def submit(lab: Lab, *, policy: str = "") -> str:
    (lab.folder / "train.py").write_text(TRAIN)
    python = os.sys.executable
    (lab.folder / "run.toml").write_text(
        textwrap.dedent(f"""\
            [run]
            name = "hung"
            command = ["{python}", "train.py"]
            dir = "run"
            [gang]
            nodes = 4
            ranks_per_node = 2
            [budgets]
            step = "4s"
            [evidence]
            timeout = "12s"
            {policy}
            """)
    )
    job_id = json.loads(lab.krea("submit", "run.toml", "--json").stdout)["job_id"]
    wait_until(lambda: (beat := lab.rank(job_id, WORLD - 1)) is not None and beat.step >= 4, "the last step")
    return str(job_id)


def evidence(lab: Lab) -> dict[str, str]:
    (incident,) = lab.incidents()
    return dict(
        line.split(" " if line.startswith("collected") else ": ", 1)
        for line in incident["evidence"]
        if line[:5] != "rank "
    )


def test_who_waits_where_is_on_record_before_the_requeue(lab: Lab) -> None:
    job_id = submit(lab)
    stopped = lab.rank(job_id, 5)
    os.kill(stopped.pid, signal.SIGSTOP)
    said = lab.supervise_until_over(every="1s")

    assert lab.run_state() == "DONE", said
    assert lab.job(job_id) == ("COMPLETED", 1)
    told = evidence(lab)
    assert "from 4 of 4 nodes" in told["collected"], told
    assert told["stacks"] == "7 of 8 ranks wait in all_reduce (train.py:7); rank 3 in next_batch (train.py:11)"
    assert told["processes"] == f"rank 5 on {stopped.node} stopped (SIGSTOP or a debugger)"
    folder = lab.folder / "run" / "incidents" / f"{job_id}.r0"
    assert sorted(path.name for path in (folder / "stacks").iterdir()) == ["n1.txt", "n2.txt", "n3.txt", "n4.txt"]
    assert "ranks 0,1,2,4,5,6,7 in all_reduce" in (folder / "stacks.txt").read_text()
    document = json.loads((folder / "evidence.json").read_text())
    assert document["finding"]["cause"] == "rank_stopped"
    assert set(document["collected"]["nodes"]) == {"n1", "n2", "n3", "n4"}
    assert not (lab.folder / "run" / "incidents" / f"{job_id}.r1").exists()


def test_a_run_that_is_only_observed_is_looked_at_once_and_goes_on(lab: Lab) -> None:
    job_id = submit(lab, policy='[policy]\nmode = "observe"')
    for _ in range(12):
        lab.krea("supervise", "--once", check=False)
        if lab.incidents():
            break
    first = lab.incidents()
    assert "from 4 of 4 nodes" in evidence(lab)["collected"]
    again = lab.krea("supervise", "--once").stdout
    assert lab.incidents() == first, again
    assert lab.job(job_id) == ("RUNNING", 0)
    assert "krea-evidence" not in lab.slurm("squeue", "-s", "-h", "-j", job_id, "-o", "%j")


def test_a_step_beside_another_changes_nothing_of_it(lab: Lab, slurm_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit(lab)
    before = lab.rank(job_id, 0)
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    slurm: Any = SlurmCli()
    user = lab.user.name
    done = slurm.run_beside(
        job_id, ["n1", "n3"], ["sh", "-c", "echo $SLURMD_NODENAME; exit 3"], timeout_s=10, user=user
    )
    assert (sorted(done.stdout.split()), done.returncode) == (["n1", "n3"], 3)
    late = slurm.run_beside(
        job_id, ["n1", "n3"], ["sh", "-c", "echo $SLURMD_NODENAME; sleep 60"], timeout_s=2, user=user
    )
    assert (sorted(late.stdout.split()), late.timed_out) == (["n1", "n3"], True)
    slurm.end_beside(job_id)
    wait_until(
        lambda: "krea-evidence" not in lab.slurm("squeue", "-s", "-h", "-j", job_id, "-o", "%j"), "no step of ours"
    )
    assert lab.job(job_id) == ("RUNNING", 0)
    wait_until(lambda: lab.rank(job_id, 0).flush > before.flush, "a flush")


def test_a_node_that_does_not_answer_costs_no_more_than_the_cap_and_its_own_evidence(lab: Lab, slurm_cluster) -> None:
    job_id = submit(lab)
    daemon = int((slurm_cluster.folder / "run" / "slurmd-n2.pid").read_text())
    os.kill(daemon, signal.SIGSTOP)
    try:
        wait_until(lambda: bool(lab.krea("supervise", "--once", check=False) and lab.incidents()), "the incident")
        told = evidence(lab)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert "from 3 of 4 nodes; n2" in told["collected"], told
    assert float(told["collected"].split()[1]) < 12 + 3, told
    assert "rank 3" not in told["stacks"]
    assert told["stacks"].startswith("6 of 8 ranks wait in all_reduce"), told
    wait_until(
        lambda: "krea-evidence" not in lab.slurm("squeue", "-s", "-h", "-j", job_id, "-o", "%j"), "no step of ours"
    )
