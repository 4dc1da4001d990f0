"""A run directory over a real SFTP server: what is read, what is not read again, and what is refused."""

import dataclasses
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from krea_runner.clock import SystemClock
from krea_runner.config import load_run
from krea_runner.config.site import state_dir
from krea_runner.diagnose.signatures import load_catalog
from krea_runner.errors import FilesUnavailable
from krea_runner.heartbeat import Heartbeat
from krea_runner.model import (
    BEAT_FILES,
    LOG_PATTERN,
    Attempt,
    AttemptKey,
    Finding,
    JobRecord,
    JobState,
    ProgressSpec,
    Run,
    RunConfig,
    RunState,
    Snapshot,
    Symptom,
    Watch,
)
from krea_runner.observe.logs import attempt_marker
from krea_runner.observe.snapshot import observe
from krea_runner.rundir import RunDir
from krea_runner.supervise.diagnosis import keep_diagnosis
from krea_runner.supervise.evidence import evidence_document, write_evidence
from krea_runner.supervise.left_behind import Bounds, read_left_behind
from krea_runner.transport import mirror as mirror_module
from krea_runner.transport import ssh as ssh_module
from krea_runner.transport.mirror import looked_at_together, mirrored, put_files
from krea_runner.transport.sftp import Pipeline
from krea_runner.transport.ssh import open_ssh
from tests.conftest import free_port, until
from tests.ssh_server import SSHD, Sshd, write_home

pytest.importorskip("paramiko", reason="paramiko is not installed: pip install 'krea-runner[ssh]'")

from paramiko.sftp import CMD_OPEN

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

    def look(self, memory: Watch | None = None) -> Snapshot:
        run = Run(1, "far", "me", self.config, RunState.ACTIVE, "", "26", "tag", 0.0)
        job = JobRecord("26", JobState.RUNNING, "RUNNING")
        return observe(run, job, Attempt(1, 1, KEY, 0.0), memory, SystemClock())


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
    for name, value in {
        "KREA_HEARTBEAT_DIR": str(far.run_dir.heartbeats(KEY)),
        "KREA_ATTEMPT": str(KEY),
        "RANK": "0",
    }.items():
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


def test_beat_files_and_progress_lines_are_seen_as_if_they_were_here(far: Far) -> None:
    far.config = dataclasses.replace(far.config, progress=ProgressSpec(pattern="megatron"))
    folder, log = far.run_dir.heartbeats(KEY), far.run_dir.batch_log("26")
    folder.mkdir(parents=True)
    (folder / "julia.beat").write_text("7\n")
    log.write_text("x" * 300_000 + "\n iteration        8/     100 | loss |\n")
    looked = far.look()
    assert {(source.name, source.step) for source in looked.watch.sources} >= {(BEAT_FILES, 7), (LOG_PATTERN, 8)}
    again = far.look(looked.watch)  # the file is read again, its time over there is the same: no beat
    assert [source.moved_mono for source in again.watch.sources] == [
        source.moved_mono for source in looked.watch.sources
    ]
    (folder / "julia.beat").write_text("9\n")
    os.utime(folder / "julia.beat", (2e9, 2e9))  # SFTP tells whole seconds, and the looks before were in this one
    with log.open("a") as file:
        file.write(" iteration        9/     100 | loss |\n")
    moved = {source.name: (source.step, source.moved_mono) for source in far.look(again.watch).watch.sources}
    assert {name: moved[name][0] for name in (BEAT_FILES, LOG_PATTERN)} == {BEAT_FILES: 9, LOG_PATTERN: 9}
    assert min(moved[BEAT_FILES][1], moved[LOG_PATTERN][1]) > again.mono


def test_what_did_not_change_is_not_read_again(far: Far) -> None:
    folder = far.run_dir.heartbeats(KEY)
    folder.mkdir(parents=True)
    (folder / "n1.hb").write_bytes(b"\0" * 256)
    far.run_dir.batch_log("26").write_text("x" * 1000)
    for _ in range(2):  # times are whole seconds: the second look makes sure
        mirrored(far.config, KEY)
    mirrored(far.config, KEY)
    far.run_dir.batch_log("26").write_text("x" * 1000 + "y")
    mirrored(far.config, KEY)
    open_ssh("login").close()  # the server has said by then what it closed
    log = str(far.run_dir.batch_log("26"))
    until(lambda: far.sshd.bytes_read().get(log) == 1001, "the one new byte to be read, and no more", 10)
    assert far.sshd.bytes_read()[str(folder / "n1.hb")] == 2 * 256


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


# -------------------------------------------------------------------------------------------- what it costs, what fails


def test_of_a_log_of_a_gigabyte_only_the_end_and_then_only_what_is_new_is_read(far: Far) -> None:
    """As the server counts it."""
    log = far.run_dir.batch_log("26")
    with log.open("wb") as file:
        file.truncate(1 << 30)
    assert far.look().log.size_bytes == 1 << 30
    for number in range(3):
        with log.open("ab") as file:
            file.write(b"step %d\n" % number)
        assert far.look().log.tail.endswith(f"step {number}\n")
    open_ssh("login").close()
    until(
        lambda: far.sshd.bytes_read().get(str(log)) == (64 << 10) + 3 * len("step 0\n"), "the end of what was read", 10
    )


def test_many_runs_cost_the_round_trips_of_one(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten runs of twelve nodes, all heartbeats changed: each was four round trips a file and five a folder."""
    configs = [dataclasses.replace(far.config, run_dir=far.config.run_dir / str(number)) for number in range(10)]
    for config in configs:
        folder = RunDir(config.run_dir).heartbeats(KEY)
        folder.mkdir(parents=True)
        for node in range(12):
            (folder / f"n{node}.hb").write_bytes(b"\0" * 256)
    made: list[Pipeline] = []
    monkeypatch.setattr(mirror_module, "Pipeline", lambda sftp: made.append(Pipeline(sftp)) or made[-1])
    with looked_at_together([(config, KEY) for config in configs]):
        seen = [mirrored(config, KEY) for config in configs]
    assert [len(list(RunDir(config.run_dir).heartbeats(KEY).glob("*.hb"))) for config in seen] == [12] * 10
    assert len(made) == 1  # nothing was read a second time
    assert (made[0].rounds, made[0].requests > 3 * 120) == (4, True)


def test_more_files_than_an_account_may_open_are_read_in_turns(far: Far) -> None:
    folder = far.run_dir.heartbeats(KEY)
    folder.mkdir(parents=True)
    for node in range(700):
        (folder / f"n{node}.hb").write_bytes(b"%4d" % node * 64)
    open_ssh("login").close()
    assert far.sshd.process is not None
    resource.prlimit(far.sshd.process.pid, resource.RLIMIT_NOFILE, (400, 400))  # handed on to what it starts
    seen = RunDir(mirrored(far.config, KEY).run_dir).heartbeats(KEY)
    assert {path.name: path.read_bytes() for path in seen.glob("*.hb")} == {
        f"n{node}.hb": b"%4d" % node * 64 for node in range(700)
    }


def test_one_run_that_cannot_be_read_does_not_hide_the_others(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(far.config, run_dir=far.config.run_dir / "other")
    put_files(other, [RunDir(other.run_dir).logs], {})
    far.run_dir.batch_log("26").write_text("x")
    monkeypatch.setattr(mirror_module, "MAX_SIZE_BYTES", 0)
    with looked_at_together([(far.config, KEY), (other, KEY)]):
        with pytest.raises(FilesUnavailable, match="says it has 1 bytes"):
            mirrored(far.config, KEY)
        assert mirrored(other, KEY).run_dir != other.run_dir


def test_a_connection_cut_in_the_middle_of_reading_is_made_again_and_all_is_seen(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.run_dir.batch_log("26").write_text("x" * 100_000 + "end\n")
    far.look()
    with far.run_dir.batch_log("26").open("a") as file:
        file.write("more\n")
    real, cuts = Pipeline._ask, []

    def cut_once(self, requests):
        if len(requests) and not cuts and requests[0][0] == CMD_OPEN:  # what is wanted is known, nothing is read yet
            cuts.append(requests)
            far.sshd.cut()
            until(lambda: not far.sshd.sessions(), "the cut", 10)
        return real(self, requests)

    monkeypatch.setattr(Pipeline, "_ask", cut_once)
    assert far.look().log.tail.endswith("end\nmore\n")
    assert len(cuts) == 1
    assert far.sshd.connections == 2


@pytest.mark.parametrize(
    ("subsystem", "said"),
    [
        ("Subsystem other /bin/true", "offers no SFTP"),
        ("Subsystem sftp /no/such/server", "offers no SFTP"),
        ("Subsystem sftp /bin/sh -c 'echo Welcome; exec /usr/lib/openssh/sftp-server'", "is no SFTP"),
    ],
)
def test_a_login_node_without_sftp_says_so_and_commands_still_run(far: Far, subsystem: str, said: str) -> None:
    far.sshd.stop()
    far.sshd.more = [subsystem]
    far.sshd.start()
    with pytest.raises(FilesUnavailable, match=said) as caught:
        far.look()
    assert 'files = "mounted"' in (caught.value.hint or "")
    assert open_ssh("login").run(["echo", "in"], timeout_s=10).stdout == "in\n"


def test_times_of_a_login_node_whose_clock_is_off_are_never_compared_with_ours(far: Far) -> None:
    folder, now = far.run_dir.heartbeats(KEY), time.time()
    folder.mkdir(parents=True)
    for minutes, content in ((-7, b"a"), (9, b"b"), (-7, b"c")):
        path = folder / "n1.hb"
        path.write_bytes(content * 256)
        os.utime(path, (now + 60 * minutes,) * 2)
        seen = RunDir(mirrored(far.config, KEY).run_dir).heartbeats(KEY)
        assert (seen / "n1.hb").read_bytes() == content * 256


def test_evidence_is_kept_over_there_or_where_that_fails_here(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(Symptom.HANG, "rank_stopped", "hang: rank 3 stopped")
    snapshot = far.look()
    path = write_evidence(far.config, KEY, evidence_document(snapshot, finding))
    assert path == far.run_dir.incident(KEY) / "evidence.json"
    assert json.loads(path.read_text())["finding"]["cause"] == "rank_stopped"
    monkeypatch.setattr(ssh_module, "CONNECT_S", 2.0)
    far.sshd.stop()
    path.unlink()
    kept = write_evidence(far.config, KEY, evidence_document(snapshot, finding))
    assert kept is not None
    assert kept.is_relative_to(state_dir())
    assert json.loads(kept.read_text())["finding"]["cause"] == "rank_stopped"


def test_what_a_failed_attempt_left_over_there_is_diagnosed_within_bounds(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = far.run_dir.attempt_logs(KEY)
    logs.mkdir(parents=True)
    (logs / "node-0.log").write_text("0: step 1\n" * 400_000 + "0: [rank0]: KeyError: 'x'\n")
    (logs / "node-1.log").write_text("1: step 1\n")
    catalog, snapshot = load_catalog(), far.look()
    verdict, left = read_left_behind(snapshot, catalog, still_running=False, bounds=Bounds(far_bytes=3 << 20))
    assert verdict is not None
    assert (verdict.cause, verdict.problems) == (
        "user_exception",
        (f"log not read whole: {logs}/node-0.log: only its end, of 3.81 MiB; its lines are counted from there",),
    )
    assert verdict.first_evidence is not None
    assert left.where(verdict.first_evidence.file) == f"{logs}/node-0.log"
    verdict, left = read_left_behind(snapshot, catalog, still_running=False, is_late=lambda: True)
    assert verdict is None
    assert left.problems[0].startswith("log not read whole: ")

    keep_diagnosis(snapshot, {"cause": "user_exception"})
    assert json.loads((far.run_dir.incident(KEY) / "diagnosis.json").read_text()) == {"cause": "user_exception"}
    monkeypatch.setattr(ssh_module, "CONNECT_S", 2.0)
    far.sshd.stop()
    (far.run_dir.incident(KEY) / "diagnosis.json").unlink()
    verdict, _ = read_left_behind(snapshot, catalog, still_running=False)
    assert verdict is not None
    assert (verdict.cause, verdict.problems[0].split(":")[1]) == (
        "user_exception",
        " only what was copied before, reading files on login",
    )
    keep_diagnosis(snapshot, {"cause": "user_exception"})
    assert len(list(state_dir().rglob("diagnosis.json"))) == 1


@pytest.mark.parametrize("name", [b"n\xff.hb", "ü.hb".encode(), b"a\nb.hb"])
def test_a_name_of_any_bytes_is_read(far: Far, name: bytes) -> None:
    folder = far.run_dir.heartbeats(KEY)
    folder.mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"x")
    seen = RunDir(mirrored(far.config, KEY).run_dir).heartbeats(KEY)
    assert [os.fsencode(path.name) for path in seen.iterdir()] == [name]
