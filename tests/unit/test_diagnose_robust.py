"""Logs that are damaged, forbidden, endless or malicious: an answer, or an error that says what is wrong."""

import gzip
import lzma
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from krea_runner.cli.app import main
from krea_runner.cli.diagnose import lines
from krea_runner.diagnose.layout import from_job
from krea_runner.diagnose.logs import diagnose
from krea_runner.diagnose.reading import LogUnreadable
from krea_runner.errors import KreaRunnerError, NotFound
from tests.fuzz_diagnose import fuzz

FAILURE = b"[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    (".gz", gzip.compress),
    (".xz", lzma.compress),
    (".zst", zstandard.compress),
]


@pytest.mark.parametrize(("suffix", "pack"), PACKED)
def test_a_compressed_log_that_was_cut_off_is_judged_by_what_is_left(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.log{suffix}"
    # Noise that does not compress, more than any decompressor holds back.
    noise = random.Random(1).randbytes(600_000).hex(" ", 40).replace(" ", "\n").encode()
    whole = pack(b"step 1\n" + FAILURE + noise)
    path.write_bytes(whole[: len(whole) - 100])
    verdict = diagnose([str(path)])
    assert (verdict.cause, verdict.first_evidence and verdict.first_evidence.line) == ("gpu_ecc", 2)
    assert len(verdict.problems) == 1
    assert "ended before" in verdict.problems[0]
    assert any(line.startswith("unread") for line in lines(verdict))
    path.write_bytes(whole[:20])
    with pytest.raises(LogUnreadable, match="ended before"):
        diagnose([str(path)])


def test_a_log_of_many_zstandard_frames_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.log.zst"
    path.write_bytes(b"".join(zstandard.compress(b"step %d\n" % n) for n in range(300)) + zstandard.compress(FAILURE))
    verdict = diagnose([str(path)])
    assert (verdict.cause, verdict.first_evidence and verdict.first_evidence.line) == ("gpu_ecc", 301)


@pytest.fixture
def nobody() -> Iterator[None]:
    """As root every file can be read: become an ordinary user for the time of the test."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.usefixtures("nobody")
def test_what_may_not_be_read_is_said_and_the_other_logs_are_judged() -> None:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="krea-forbidden-"))
    closed, closed_log, log = folder / "closed", folder / "b.log", folder / "a.log"
    try:
        log.write_bytes(FAILURE)
        closed_log.write_bytes(FAILURE)
        closed_log.chmod(0)
        closed.mkdir(mode=0)
        for name in (closed_log, closed / "c.log", closed):
            with pytest.raises(LogUnreadable, match="Permission denied"):
                diagnose([str(name)])
        verdict = diagnose([str(log), str(closed_log)])
        assert verdict.cause == "gpu_ecc"
        assert "Permission denied" in verdict.problems[0]
    finally:
        closed.chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["none.log", "a.log/below", "x" * 5000, "nul\0.log", "loop"])
def test_a_name_that_is_no_log_is_our_own_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.log").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((NotFound, LogUnreadable)):
        diagnose([str(tmp_path / name)])


def test_a_job_file_whose_nodes_are_no_list_is_an_error_with_an_example() -> None:
    for nodes in ("n1", 3, True, {"n1": 1}, [["n1"]], [1]):
        with pytest.raises(KreaRunnerError, match="not a list of names") as error:
            from_job({"nodes": nodes})
        assert '["n1", "n2"]' in error.value.hint


PEAK = "import resource, sys; from krea_runner.diagnose.logs import diagnose; v = diagnose([sys.argv[1]]); print(" \
    "v.cause, v.first_evidence.line, int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) // 1024)"  # fmt: skip


def test_lines_of_a_hundred_megabytes_cost_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:  # NULs, as a file system leaves them after a crash; sparse
        file.truncate(100_000_000)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + FAILURE)
        for _ in range(100):
            file.write(b"\r waiting for nobody " * 50_000)
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    cause, line, peak_mb = done.stdout.split()
    assert (cause, line) == ("gpu_ecc", "2")
    assert int(peak_mb) < 100


def test_a_pipe_whose_writer_is_slow_or_dies_in_a_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for at in range(0, len(FAILURE), 7):
                file.write(FAILURE[at : at + 7])
            file.write(b"half a li")

    writer = threading.Thread(target=write)
    writer.start()
    assert diagnose([str(path)]).cause == "gpu_ecc"
    writer.join()


def test_nothing_of_a_log_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.log\x1b[2J"
    evil = "\x1b[2J\x1b]0;owned\x07\x9b31m\x08\x7f\u202e\u2066\u200b"
    path.write_text(f"[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered {evil} {evil}\n")
    verdict = diagnose([str(path)])
    shown = "\n".join(lines(verdict))
    assert verdict.cause == "gpu_ecc"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066]", shown), repr(shown)


def test_nothing_of_a_name_reaches_the_terminal_in_an_error_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["krea-runner", "diagnose", "/none\x1b[2J\x9b31m.log"])
    with pytest.raises(SystemExit):
        main()
    assert r"/none\x1b[2J\x9b31m.log" in capsys.readouterr().err


def test_a_log_of_near_matches_only_is_looked_at_up_to_a_cap(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"step 1 | loss 2.0\n" + (b"NVRM: Xid (PCI:" + b":" * 100 + b"\n") * 200_000 + FAILURE)
    verdict = diagnose([str(path)])  # pytest-timeout is the judge
    assert (verdict.cause, verdict.first_evidence and verdict.first_evidence.line) == ("gpu_ecc", 200_002)


def test_damaged_input_of_every_kind_gives_an_answer_or_our_own_error() -> None:
    count, failed = fuzz(4.0, first_seed=20_26)
    assert failed == []
    assert count > 5
