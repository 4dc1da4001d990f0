"""A run directory over a real SFTP server: what is read, what is not read again, and what is refused."""

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from krea_runner.clock import SystemClock
from krea_runner.config import load_run
from krea_runner.errors import FilesUnavailable
from krea_runner.heartbeat import Heartbeat
from krea_runner.model import Attempt, AttemptKey, JobRecord, JobState, Run, RunConfig, RunState, Snapshot
from krea_runner.observe.logs import attempt_marker
from krea_runner.observe.snapshot import observe
from krea_runner.rundir import RunDir
from krea_runner.transport import mirror as mirror_module
from krea_runner.transport import ssh as ssh_module
from krea_runner.transport.mirror import mirrored, put_files
from krea_runner.transport.ssh import open_ssh
from tests.conftest import free_port
from tests.ssh_server import SSHD, Sshd, write_home

pytest.importorskip("paramiko", reason="paramiko is not installed: pip install 'krea-runner[ssh]'")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="sshd is not installed: apt-get install openssh-server"),
]
KEY = AttemptKey("26", 0)


@dataclass
class Far:
    sshd: Sshd
    config: RunConfig

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.config.run_dir)

    def look(self) -> Snapshot:
        run = Run(1, "far", "me", self.config, RunState.ACTIVE, "", "26", "tag", 0.0)
        job = JobRecord("26", JobState.RUNNING, "RUNNING")
        return observe(run, job, Attempt(1, 1, KEY, 0.0), None, SystemClock())


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KREA_RUNNER_STATE_DIR", str(tmp_path / "state"))
    sshd = Sshd(tmp_path / "sshd", free_port())
    write_home(tmp_path / "home", sshd)
    sshd.start()
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "far"\ncommand = ["true"]\ntransport = "ssh"\nssh_host = "login"\nfiles = "sftp"\n'
        f'dir = "{tmp_path}/far/run"\nworkdir = "{tmp_path}/far"\n[checkpoint]\ndir = "ckpt"\n'
    )
    open_ssh.cache_clear()
    mirror_module._mirror.cache_clear()
    far = Far(sshd, load_run(path))
    put_files(far.config, [far.run_dir.logs, far.run_dir.events], {far.run_dir.script: b"#!/bin/sh\n"})
    yield far
    open_ssh("login").close()
    sshd.stop()


def test_what_was_put_there_is_there(far: Far) -> None:
    assert far.run_dir.script.read_text() == "#!/bin/sh\n"
    assert far.run_dir.logs.is_dir()
    assert [path.name for path in far.run_dir.root.iterdir() if path.name.startswith(".")] == []


def test_heartbeats_logs_and_checkpoints_are_seen_as_if_they_were_here(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"KREA_HEARTBEAT_DIR": str(far.run_dir.heartbeats(KEY)), "KREA_ATTEMPT": str(KEY)}.items():
        monkeypatch.setenv(name, value)
    hb = Heartbeat()
    try:
        hb.step(5)
        time.sleep(1.3)
        log = far.run_dir.batch_log("26")
        log.write_text("x" * 300_000 + "\n" + attempt_marker(KEY) + "begins\nhello\n")
        for step, whole in ((10, True), (20, True), (30, False)):
            folder = Path(f"{far.config.checkpoint.directory}/step_{step}")
            folder.mkdir(parents=True)
            if whole:
                (folder / "COMPLETE").touch()
        first = far.look()
        assert [beat.step for beat in first.heartbeats.ranks] == [5]
        assert first.log.size_bytes == log.stat().st_size
        assert first.log.tail.endswith("begins\nhello\n")
        assert first.checkpoints.newest is not None
        assert first.checkpoints.newest.path == Path(f"{far.config.checkpoint.directory}/step_20")
        assert first.checkpoints.incomplete == ("step_30",)
        hb.step(6)  # rewritten in place: the size stays
        time.sleep(1.3)
        with log.open("a") as file:
            file.write("more\n")
        again = far.look()
        assert [beat.step for beat in again.heartbeats.ranks] == [6]
        assert again.log.tail.endswith("hello\nmore\n")
    finally:
        hb.close()


def test_what_did_not_change_is_not_read_again(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = far.run_dir.heartbeats(KEY)
    folder.mkdir(parents=True)
    (folder / "n1.hb").write_bytes(b"\0" * 256)
    far.run_dir.batch_log("26").write_text("x" * 1000)
    for _ in range(2):  # times are whole seconds: the second look makes sure
        mirrored(far.config, KEY)
    opened = []
    sftp = open_ssh("login").sftp()
    real = type(sftp).open
    monkeypatch.setattr(type(sftp), "open", lambda self, *a, **k: (opened.append(a[0]), real(self, *a, **k))[1])
    mirrored(far.config, KEY)
    assert opened == []
    far.run_dir.batch_log("26").write_text("y" * 1001)
    mirrored(far.config, KEY)
    assert opened == [str(far.run_dir.batch_log("26"))]


def test_links_are_not_followed_and_sizes_are_bounded(far: Far, tmp_path: Path) -> None:
    folder = far.run_dir.attempt_logs(KEY)
    folder.mkdir(parents=True)
    (folder / "node-0.log").symlink_to("/etc/passwd")
    os.truncate((far.run_dir.batch_log("26").write_text(""), far.run_dir.batch_log("26"))[1], 1 << 36)
    seen = RunDir(mirrored(far.config, KEY).run_dir)
    assert not seen.attempt_logs(KEY).exists()
    assert seen.batch_log("26").stat().st_size == 1 << 36
    assert seen.batch_log("26").stat().st_blocks * 512 < 1 << 20


def test_a_copy_that_grew_large_begins_afresh_and_keeps_the_end(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "KEPT_BYTES", 100_000)
    log, text = far.run_dir.batch_log("26"), ""
    for number in range(4):
        text += f"{number}" * 60_000
        log.write_text(text)
        copy = RunDir(mirrored(far.config, KEY).run_dir).batch_log("26")
        assert copy.read_text()[-60_000:] == text[-60_000:]
        assert copy.stat().st_size == len(text)
    assert copy.stat().st_blocks * 512 < len(text)
    log.write_text("begun again")
    mirrored(far.config, KEY)
    assert copy.read_text() == "begun again"


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../x", "x\0", "n" * 256])
def test_names_that_lead_elsewhere_are_no_names(name: str) -> None:
    assert not mirror_module._is_plain(name)


def test_files_that_cannot_be_read_are_unseen_and_not_frozen(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    far.look()
    monkeypatch.setattr(ssh_module, "CONNECT_S", 2.0)
    far.sshd.stop()
    with pytest.raises(FilesUnavailable, match="login"):
        far.look()
    far.sshd.start()
    assert far.look().job is not None
    open_ssh("login").close_sftp()
    far.look()
    far.sshd.signal_all(signal.SIGSTOP)
    with pytest.raises(FilesUnavailable):
        far.look()
    far.sshd.signal_all(signal.SIGCONT)
    assert dataclasses.replace(far.look(), mono=0.0).attempt is not None
