"""A file system that does not answer: a real one, of FUSE, whose server never says a word."""

import ctypes
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from krea_runner.config.site_toml import answer_within_s
from krea_runner.errors import ConfigError, FilesUnavailable
from krea_runner.model import Attempt, AttemptKey
from krea_runner.observe import answered as module
from krea_runner.observe.answered import answered, begin_round
from krea_runner.observe.snapshot import observe
from krea_runner.supervise.evidence import write_evidence

from .conftest import FakeClock, make_config, make_run

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="mounting is for root")
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes a directory one whose file system answers nothing, until the test is over."""
    (tmp_path / "site.toml").write_text('[files]\nanswer_within = "1s"\n')
    monkeypatch.setenv("KREA_RUNNER_SITE", str(tmp_path / "site.toml"))
    begin_round()
    mounted: list[tuple[int, Path]] = []

    def mount(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        server = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if LIBC.mount(b"dead", os.fsencode(directory), b"fuse", 0, options):
            os.close(server)
            pytest.skip(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
        mounted.append((server, directory))

    yield mount
    for server, directory in mounted:
        os.close(server)  # who waits gets ENOTCONN
        assert LIBC.umount2(os.fsencode(directory), 2) == 0


def test_a_dead_run_directory_is_could_not_see_within_its_time_and_is_not_asked_again(
    tmp_path: Path, dies: Callable[[Path], None]
) -> None:
    run = make_run(make_config(tmp_path))
    attempt = Attempt(1, 1, AttemptKey("7"), 0.0)
    dies(run.config.run_dir)
    begun = time.monotonic()
    with pytest.raises(FilesUnavailable, match=r"does not answer \(.*/run\), for 1 s"):
        observe(run, None, attempt, None, FakeClock())
    assert time.monotonic() - begun < 5
    begun = time.monotonic()
    with pytest.raises(FilesUnavailable, match="does not answer"):
        observe(run, None, attempt, None, FakeClock())
    assert time.monotonic() - begun < 0.3
    assert write_evidence(run.config, attempt.key, {"a": 1}) is None
    other = make_run(make_config(tmp_path / "other"))
    assert observe(other, None, attempt, None, FakeClock()).problems == ()


def test_dead_checkpoints_alone_leave_the_run_in_sight(tmp_path: Path, dies: Callable[[Path], None]) -> None:
    run = make_run(make_config(tmp_path))
    dies(tmp_path / "ckpt")
    (problem,) = observe(run, None, Attempt(1, 1, AttemptKey("7"), 0.0), None, FakeClock()).problems
    assert problem.startswith(f"checkpoints: file system does not answer ({tmp_path}/ckpt)")


def test_many_dead_runs_do_not_add_up(tmp_path: Path, dies: Callable[[Path], None]) -> None:
    dies(tmp_path / "dead")
    config, begun = make_config(tmp_path), time.monotonic()
    for number in range(12):
        folder = tmp_path / "dead" / str(number)
        with pytest.raises(FilesUnavailable):
            answered(config, folder, lambda folder=folder: list(folder.iterdir()))
    assert module._round.in_vain_s < 12
    assert time.monotonic() - begun < 14


def test_slow_answers_are_waited_for(tmp_path: Path, dies: Callable[[Path], None]) -> None:
    def slow() -> str:
        for _ in range(20):
            time.sleep(0.1)
        return "read"

    assert answered(make_config(tmp_path), tmp_path, slow) == "read"


def test_what_a_read_raises_is_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        answered(make_config(tmp_path), tmp_path, (tmp_path / "none").read_bytes)


def test_files_over_sftp_are_read_by_whoever_asks(tmp_path: Path) -> None:
    import threading

    config = dataclasses.replace(make_config(tmp_path), files="sftp")
    assert answered(config, tmp_path, threading.current_thread) is threading.current_thread()


@pytest.mark.parametrize("value", ['"0.5s"', '"2m"', "true", '"soon"'])
def test_a_wrong_time_in_site_toml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    (tmp_path / "site.toml").write_text(f"[files]\nanswer_within = {value}\nanswr = 1\n")
    monkeypatch.setenv("KREA_RUNNER_SITE", str(tmp_path / "site.toml"))
    with pytest.raises(ConfigError) as raised:
        answer_within_s()
    assert "answer_within" in raised.value.problems[0] + raised.value.problems[1]
    assert len(raised.value.problems) == 2
