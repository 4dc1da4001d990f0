"""A run from end to end from outside the cluster: commands over SSH, files over SFTP, no file of the run seen from here."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from krea_runner.model import AttemptKey
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.rundir import RunDir
from tests.conftest import OrdinaryUser, free_port, until
from tests.ssh_server import SSHD, Sshd, write_home

pytest.importorskip("paramiko", reason="paramiko is not installed: pip install 'krea-runner[ssh]'")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="sshd is not installed: apt-get install openssh-server"),
]
STEPS, EVERY = 60, 10


@dataclass
class Outside:
    """The user's own machine, which knows the cluster only as `login`; `far` is a folder of the cluster's side, where
    the commands run as whoever runs the tests (root: then the user may not even look into it)."""

    user: OrdinaryUser
    home: Path
    far: Path
    sshd: Sshd

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.far / "run")

    @property
    def state(self) -> Path:
        return self.home / "state"

    def krea(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.user.run([sys.executable, "-m", "krea_runner", *words], env=self.env, cwd=self.home, check=check)

    @property
    def env(self) -> dict[str, str]:
        """Without any Slurm: neither its configuration nor its commands."""
        return {"HOME": str(self.home), "KREA_RUNNER_STATE_DIR": str(self.state), "PATH": "/nowhere"}

    def submit(self, name: str = "far", steps: int = STEPS) -> str:
        words = [
            sys.executable,
            "-m",
            "krea_runner.demo.train",
            "--steps",
            str(steps),
            "--checkpoint-every",
            str(EVERY),
        ]
        (self.home / "run.toml").write_text(
            textwrap.dedent(f"""
            [run]
            name = "{name}"
            command = {json.dumps([*words, "--step-time", "0.1"])}
            transport = "ssh"
            ssh_host = "login"
            files = "sftp"
            dir = "{self.run_dir.root}"
            workdir = "{self.far}"
            [gang]
            nodes = 2
            ranks_per_node = 2
            [budgets]
            startup = "60s"
            step = "2s"
            checkpoint = "5s"
            [checkpoint]
            dir = "ckpt"
            """)
        )
        return str(json.loads(self.krea("submit", "run.toml", "--json").stdout)["job_id"])

    def pid_of_rank(self, attempt: AttemptKey, rank: int, *, step: int) -> int:
        """Once that rank has come to `step`."""

        def found() -> list[int]:
            beats = read_heartbeats(self.run_dir.heartbeats(attempt), str(attempt)).ranks
            return [beat.pid for beat in beats if beat.rank == rank and beat.step >= step]

        until(found, f"step {step}")
        return found()[0]

    def status(self, *words: str) -> dict:
        return json.loads(self.krea("status", "--all", "--json", *words, check=False).stdout)["runs"][0]

    def incidents(self) -> list[dict]:
        return json.loads(self.krea("history", "--json").stdout)["incidents"]


@pytest.fixture
def outside(slurm_cluster, ordinary_user: OrdinaryUser, tmp_path: Path) -> Iterator[Outside]:
    (tmp_path / "bin").mkdir()
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(slurm_cluster.conf)}
    sshd = Sshd(tmp_path / "sshd", free_port(), environment)
    sshd.start()
    home = ordinary_user.make_dir()
    write_home(home, sshd, key=home / ".ssh" / "key")
    shutil.copy(sshd.folder / "user_key", home / ".ssh" / "key")
    (home / ".ssh" / "key").chmod(0o600)
    (home / "run.toml").touch()
    for path in (home / ".ssh", *(home / ".ssh").iterdir(), home / "run.toml"):
        os.chown(path, ordinary_user.uid, ordinary_user.gid)
    far = tmp_path / "far"
    far.mkdir(mode=0o700)
    outside = Outside(ordinary_user, home, far, sshd)
    yield outside
    everything = {**os.environ, **slurm_cluster.env}
    subprocess.run(["scancel", "--me"], env=everything, check=False, timeout=60)
    sshd.stop()
    until(lambda: not subprocess.run(["squeue", "-h", "--me"], env=everything, capture_output=True, check=True).stdout,
          "an empty queue")  # fmt: skip


@contextmanager
def supervisor(outside: Outside) -> Iterator[Path]:
    """Its output."""
    said = outside.home / "supervisor.log"
    identity = {"user": outside.user.uid, "group": outside.user.gid} if os.geteuid() == 0 else {}
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "krea_runner", "supervise", "--every", "2s", "--for", "150s", "--verbose"],
            env=outside.env, cwd=outside.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **identity,
        )  # fmt: skip
    try:
        yield said
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


# Keeps a record of what it is asked for, and is slow to answer.
SLOW_SCONTROL = """#!/bin/sh
echo "$*" >>"$0.calls"
{scontrol} "$@" || exit
case "$1" in requeue) sleep 3 ;; esac
"""


def test_a_stopped_rank_is_noticed_and_its_run_resumed_and_done_without_a_file_in_sight(outside: Outside) -> None:
    job_id = outside.submit()
    first = AttemptKey(job_id, 0)
    if os.geteuid() == 0:
        assert outside.user.run(["/bin/ls", str(outside.far)], check=False).returncode != 0
    scontrol = outside.far.parent / "bin" / "scontrol"
    scontrol.write_text(SLOW_SCONTROL.replace("{scontrol}", str(shutil.which("scontrol"))))
    scontrol.chmod(0o755)
    calls, connections = scontrol.with_suffix(".calls"), outside.sshd.connections
    with supervisor(outside) as said:
        os.kill(outside.pid_of_rank(first, 3, step=EVERY + 5), signal.SIGSTOP)
        until(lambda: calls.exists() and "requeue" in calls.read_text(), "the requeue to be sent", 60)
        assert outside.sshd.connections - connections == 1, said.read_text()
        outside.sshd.cut()  # Slurm has done it, and nobody hears so
        until(lambda: "done: the job completed" in said.read_text(), "the end of the run", 120)
        assert outside.sshd.connections - connections == 2, said.read_text()
        assert "could not see: scontrol was sent to login, and the connection was cut" in said.read_text()
    assert calls.read_text().splitlines().count(f"requeue {job_id}") == 1
    assert outside.status()["job_id"] == job_id

    (incident,) = outside.incidents()
    assert (incident["symptom"], incident["cause"], incident["decision"]) == ("hang", "rank_stopped", "REQUEUE")
    assert {("rank", "3"), ("node", incident["node"])} <= {(s["kind"], s["name"]) for s in incident["suspects"]}
    assert incident["checkpoint_step"] % EVERY == 0
    assert incident["resumed_step"] > incident["checkpoint_step"] > 0
    logs = outside.run_dir.attempt_logs(AttemptKey(job_id, 1))
    assert f"resumed from step {incident['checkpoint_step']}" in (logs / "node-0.log").read_text()

    run = outside.status()
    assert (run["state"], run["job"], run["checkpoint_step"], run["could_not_see"]) == ("DONE", None, STEPS, [])
    assert run["checkpoint"] == str(outside.far / "ckpt" / f"step_{STEPS:08d}")  # as the cluster calls it
    evidence = json.loads((outside.run_dir.incident(first) / "evidence.json").read_text())
    assert [beat["rank"] for beat in evidence["heartbeats"]["ranks"]] == [0, 1, 2, 3]
    assert f"krea_runner: attempt {first}" in evidence["batch_log_tail"]

    verdict = json.loads(outside.krea("diagnose", "far", "--json").stdout)
    assert verdict["problems"] == []
    shown = {item["file"] for item in verdict["evidence"]}
    assert all(Path(name).is_relative_to(outside.run_dir.root) for name in shown), verdict


def test_what_a_rank_said_before_it_died_is_diagnosed_and_a_run_is_stopped_from_outside(outside: Outside) -> None:
    job_id = outside.submit(steps=10_000)
    outside.pid_of_rank(AttemptKey(job_id, 0), 0, step=1)
    running = outside.status("far")
    assert (running["state"], running["job"]["state"], len(running["ranks"])) == ("ACTIVE", "RUNNING", 4)
    assert running["could_not_see"] == []
    with (outside.run_dir.attempt_logs(AttemptKey(job_id, 0)) / "node-1.log").open("a") as file:
        file.write("2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    outside.krea("supervise", "--once")
    first = json.loads(outside.krea("diagnose", "far", "--json").stdout)
    assert first["first_evidence"]["file"] == str(outside.run_dir.attempt_logs(AttemptKey(job_id, 0)) / "node-1.log")
    assert first["cause"] == "cuda_oom"
    assert outside.krea("stop", "far").stdout.startswith("stopped 'far'")
    outside.krea("supervise", "--once")
    assert (outside.status()["state"], outside.incidents()) == ("STOPPED", [])


def test_a_run_on_a_login_node_without_sftp_is_not_submitted(outside: Outside) -> None:
    outside.sshd.stop()
    outside.sshd.more = ["Subsystem other /bin/true"]
    outside.sshd.start()
    with pytest.raises(AssertionError, match="offers no SFTP"):
        outside.submit()
    assert outside.status()["state"] == "STOPPED"
    assert not outside.run_dir.root.exists()
