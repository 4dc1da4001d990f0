"""Slurm behind a real sshd: what is sent, what is refused, and that nothing is sent twice."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from krea_runner.errors import SchedulerError, SchedulerUnavailable
from krea_runner.schedulers import open_scheduler
from krea_runner.schedulers.slurm_cli import SlurmCli
from krea_runner.transport import ssh as ssh_module
from krea_runner.transport.ssh import Ssh, open_ssh
from tests.conftest import free_port, until
from tests.ssh_server import SSHD, Sshd, keygen, write_home

pytest.importorskip("paramiko", reason="paramiko is not installed: pip install 'krea-runner[ssh]'")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="sshd is not installed: apt-get install openssh-server"),
]

# A requeue that takes a while, and keeps a record of being asked for.
SLOW_SCONTROL = """#!/bin/sh
echo "$*" >>"$0.calls"
sleep 2
echo "$*" >>"$0.done"
"""


@dataclass
class Site:
    """A login node, and a home directory that knows it as `login`."""

    sshd: Sshd
    home: Path
    bin: Path

    def write(self, **how: Any) -> None:
        write_home(self.home, self.sshd, **how)

    def command(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.write_text(body)
        path.chmod(0o755)
        return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    (tmp_path / "bin").mkdir()
    leaks = {"SQUEUE_FORMAT": "%i", "SLURM_JOB_ID": "7", "SLURM_CONF": "/site/slurm.conf", "MY_OWN": "a b"}
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    sshd = Sshd(tmp_path / "sshd", free_port(), {"PATH": path, **leaks})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    site = Site(sshd, tmp_path / "home", tmp_path / "bin")
    site.write()
    sshd.start()
    open_ssh.cache_clear()
    yield site
    open_ssh("login").close()
    sshd.stop()


def refusal(call: Callable[[], object], kind: type[SchedulerError] = SchedulerUnavailable) -> SchedulerError:
    with pytest.raises(SchedulerError) as caught:
        call()
    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value


# --------------------------------------------------------------------------------------------------------- what is sent


def test_every_word_arrives_as_it_is(site: Site) -> None:
    words = ["a b", "$(id)", "it's", '"', "\\", "*", "", "ü\n;&|", "-x", "~"]
    done = Ssh("login").run(["printf", "%s\\0", *words], timeout_s=10)
    assert (done.returncode, done.stdout.split("\0")[:-1]) == (0, words)


def test_output_exit_code_and_input_come_through(site: Site) -> None:
    done = Ssh("login").run(["sh", "-c", "cat; echo no >&2; exit 3"], timeout_s=10, stdin="in\n")
    assert (done.returncode, done.stdout, done.stderr, done.timed_out) == (3, "in\n", "no\n", False)
    big = Ssh("login").run(["head", "-c", "5000000", "/dev/zero"], timeout_s=30)
    assert len(big.stdout) == 5_000_000


def test_the_environment_is_the_login_nodes_without_what_would_leak(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_HOST", "1")
    ssh = Ssh("login")
    seen = dict(line.partition("=")[::2] for line in ssh.run(["env"], timeout_s=10).stdout.splitlines())
    assert {"SQUEUE_FORMAT", "SLURM_JOB_ID", "OF_THIS_HOST"} & set(seen) == set()
    assert (seen["SLURM_CONF"], seen["MY_OWN"]) == ("/site/slurm.conf", "a b")
    assert (seen["LC_ALL"], seen["SLURM_TIME_FORMAT"]) == ("C", "%s")
    users = ssh.run(["env"], timeout_s=10, users_env={}).stdout
    assert "SLURM_TIME_FORMAT" not in users
    assert "MY_OWN=a b" in users


def test_a_command_that_is_not_there_is_not_on_path(site: Site) -> None:
    ssh = Ssh("login")
    with pytest.raises(FileNotFoundError, match="on login"):
        ssh.run(["no-such-command"], timeout_s=10)
    assert (ssh.has("sh"), ssh.has("no-such-command")) == (True, False)


def test_one_connection_serves_all_commands(site: Site) -> None:
    ssh = open_ssh("login")
    for number in range(20):
        assert ssh.run(["echo", str(number)], timeout_s=10).stdout == f"{number}\n"
    assert (site.sshd.folder / "log").read_text().count("Accepted publickey") == 1
    assert open_ssh("login") is ssh


def test_a_command_that_takes_too_long_is_killed_over_there(site: Site) -> None:
    pid_file = site.home / "pid"
    done = Ssh("login").run(["sh", "-c", f"echo $$ >{pid_file}; exec sleep 600"], timeout_s=1.5)
    assert done.timed_out
    pid = int(pid_file.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text(), "its end", 20)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_an_unknown_host_key_is_refused_and_the_hint_says_what_to_do(site: Site) -> None:
    site.write(known="")
    error = refusal(lambda: Ssh("login").run(["true"], timeout_s=10))
    assert "is not in" in str(error)
    assert "SHA256:" in str(error)
    assert "ssh login true" in (error.hint or "")


def test_a_changed_host_key_is_refused_and_nothing_is_sent(site: Site) -> None:
    known = site.sshd.known_hosts_line
    site.sshd.stop()
    site.sshd.new_host_key()
    site.sshd.start()
    site.write(known=known)
    error = refusal(lambda: Ssh("login").run(["touch", str(site.home / "sent")], timeout_s=10))
    assert "CHANGED" in str(error)
    assert f"ssh-keygen -R '[127.0.0.1]:{site.sshd.port}'" in (error.hint or "")
    assert not (site.home / "sent").exists()


@pytest.mark.parametrize("wrong", ["user", "key"])
def test_a_wrong_user_or_key_says_so(site: Site, wrong: str) -> None:
    keygen(site.home / "other")
    site.write(user="nobody-here") if wrong == "user" else site.write(key=site.home / "other")
    assert "none of your keys" in str(refusal(lambda: Ssh("login").run(["true"], timeout_s=10)))


def test_a_submission_that_could_not_connect_was_surely_not_sent(site: Site) -> None:
    site.write(known="")
    refusal(lambda: SlurmCli(transport=Ssh("login")).submit(Path("/a/job.sbatch"), tag="t"), SchedulerError)


def test_doctor_says_who_is_connected_where(site: Site) -> None:
    for name in ("sbatch", "squeue", "scontrol", "scancel"):
        site.command(name, "#!/bin/sh\nexit 1\n")
    connection, commands, controller = open_scheduler("slurm@login", state_dir=site.home).checks()
    assert (connection.ok, commands.ok, controller.ok) == (True, True, False)
    assert f"as {site.sshd.user}, host key ssh-ed25519 is known" in connection.detail
    site.sshd.stop()
    open_ssh("login").close()
    (connection,) = open_scheduler("slurm@login", state_dir=site.home).checks()
    assert not connection.ok
    assert connection.hint


# -------------------------------------------------------------------------------------------------------- ~/.ssh/config


def test_a_jump_host_is_gone_through_and_its_key_is_checked_too(site: Site, tmp_path: Path) -> None:
    jump = Sshd(tmp_path / "jump", free_port(), {"PATH": "/usr/bin:/bin"})
    jump.start()
    try:
        included = f"Host jump\n  HostName 127.0.0.1\n  Port {jump.port}\n  User {jump.user}\n"
        (site.home / ".ssh" / "jump.conf").write_text(included + f"  IdentityFile {jump.folder / 'user_key'}\n")
        both = site.sshd.known_hosts_line + jump.known_hosts_line
        site.write(known=both, more="  ProxyJump jump\nInclude jump.conf\n")
        ssh = Ssh("login")
        assert ssh.run(["echo", "through"], timeout_s=10).stdout == "through\n"
        assert "Accepted publickey" in (jump.folder / "log").read_text()
        ssh.close()
        site.write(known=site.sshd.known_hosts_line, more="  ProxyJump jump\nInclude jump.conf\n")
        assert "the host key of jump" in str(refusal(lambda: Ssh("login").run(["true"], timeout_s=10)))
    finally:
        jump.stop()


# ----------------------------------------------------------------------------------------------------- cut connections


def test_a_connection_that_was_cut_while_idle_is_made_again(site: Site) -> None:
    ssh = Ssh("login")
    ssh.run(["true"], timeout_s=10)
    site.sshd.cut()
    assert ssh.run(["echo", "back"], timeout_s=10).stdout == "back\n"


def test_a_requeue_whose_connection_is_cut_is_unknown_and_never_sent_again(site: Site) -> None:
    scontrol = site.command("scontrol", SLOW_SCONTROL)
    calls, done = (scontrol.with_suffix(suffix) for suffix in (".calls", ".done"))
    slurm = SlurmCli(transport=Ssh("login"))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(slurm.requeue, "26")
        until(calls.exists, "the requeue to begin", 20)
        site.sshd.cut()
        error = asked.exception(timeout=30)
    assert type(error) is SchedulerUnavailable
    assert "cut before its answer" in str(error)
    until(done.exists, "the requeue, which goes on without us", 20)
    assert slurm.transport.run(["echo", "back"], timeout_s=10).stdout == "back\n"
    assert (calls.read_text(), done.read_text()) == ("requeue 26\n", "requeue 26\n")


def test_a_login_node_that_hangs_is_given_up_in_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_module, "CONNECT_S", 2.0)
    ssh = Ssh("login")
    ssh.run(["true"], timeout_s=10)
    site.sshd.signal_all(signal.SIGSTOP)
    began = time.monotonic()
    refusal(lambda: ssh.run(["true"], timeout_s=2))
    assert time.monotonic() - began < 20
    site.sshd.signal_all(signal.SIGCONT)
    assert ssh.run(["echo", "back"], timeout_s=10).stdout == "back\n"


# ------------------------------------------------------------------------------------------------------ a real cluster


@pytest.mark.slurm
def test_a_job_is_submitted_requeued_and_cancelled_over_ssh(slurm_cluster, site: Site, tmp_path: Path) -> None:
    assert shutil.which("sbatch")
    site.sshd.stop()
    site.sshd.environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(slurm_cluster.conf), "SQUEUE_FORMAT": "%i"}
    site.sshd.start()
    assert "SLURM_CONF" not in os.environ  # this host knows no cluster
    slurm = open_scheduler("slurm@login", state_dir=tmp_path)
    assert [check for check in slurm.checks() if not check.ok] == []
    script = tmp_path / "job"
    script.write_text("#!/bin/sh\n#SBATCH --requeue\n#SBATCH --output=/dev/null\nsleep 600\n")
    job_id = slurm.submit(script, tag="it's a $(tag)")
    try:
        until(lambda: slurm.jobs([job_id])[job_id].state == "RUNNING", "the job to run")
        assert [job.job_id for job in slurm.find_by_tag("it's a $(tag)")] == [job_id]
        time.sleep(1.2)
        slurm.requeue(job_id)
        until(lambda: slurm.jobs([job_id])[job_id].state == "PENDING", "the requeue")
        assert slurm.jobs([job_id])[job_id].restart_count == 1
    finally:
        slurm.cancel(job_id)
    until(lambda: slurm.jobs([job_id])[job_id].state == "CANCELLED", "the cancel")
