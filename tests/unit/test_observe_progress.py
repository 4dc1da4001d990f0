"""What is read of the other sources of progress: logs whole, broken, huge or hostile, .beat files, checkpoints."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.config.progress_presets import compiled
from krea_runner.model import (
    BEAT_FILES,
    CHECKPOINTS,
    LOG_PATTERN,
    AttemptKey,
    Checkpoint,
    CheckpointReading,
    CheckpointSpec,
    ProgressSpec,
    SourceReading,
    Watch,
)
from krea_runner.observe import follow as following
from krea_runner.observe.follow import FILE_BYTES, Log, TooSlow, follow, time_cap
from krea_runner.observe.progress import advance_sources, read_beat_files, read_sources
from krea_runner.rundir import RunDir

KEY = AttemptKey("7")


class Follower:
    """Looks again and again, as the supervisor does."""

    def __init__(self, path: Path, pattern: str = "megatron", *, is_whole: bool = True) -> None:
        self.path, self.pattern, self.is_whole = path, compiled(pattern), is_whole
        self.known = ()

    def look(self, *more: Path) -> SourceReading:
        logs = [Log(str(path), path.name, self.is_whole) for path in (self.path, *more)]
        reading, self.known = follow(LOG_PATTERN, logs, {log.name: log for log in self.known}, self.pattern)
        return reading

    def write(self, text: str | bytes) -> SourceReading:
        with self.path.open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        return self.look()


def line(step: int) -> str:
    return f" iteration {step:8d}/     100 | consumed samples: 5 |\n"


@pytest.fixture
def log(tmp_path: Path) -> Follower:
    return Follower(tmp_path / "node-0.log")


def test_a_log_that_is_not_there_yet_has_not_moved_and_is_no_trouble(log) -> None:
    assert log.look() == SourceReading(LOG_PATTERN)


def test_each_new_step_is_progress_and_other_lines_are_none(log) -> None:
    assert log.write(line(1)) == SourceReading(LOG_PATTERN, moved=True, step=1)
    assert log.look() == SourceReading(LOG_PATTERN)
    assert not log.write("NCCL INFO noise\n").moved
    assert log.write(line(2) + line(3) + "more noise\n").step == 3


def test_the_same_step_again_is_no_progress(log) -> None:
    """tqdm's monitor prints a bar again while nothing moves."""
    log.write(line(4))
    assert not log.write(line(4)).moved


def test_a_bar_without_line_breaks_is_followed(tmp_path) -> None:
    log = Follower(tmp_path / "o", "tqdm")
    assert log.write("\r  0%|          | 0/30 [00:00<?, ?it/s]").moved
    assert log.write("\r 13%|█▎        | 4/30 [00:00<00:00, 35.84it/s]") == SourceReading(LOG_PATTERN, moved=True)
    assert not log.write("\r 13%|█▎        | 4/30 [00:10<00:00, 0.84it/s]").moved


def test_a_line_that_is_still_being_written_counts_for_its_step_only(tmp_path) -> None:
    log = Follower(tmp_path / "o", "saved")
    assert not log.write("saved").moved
    assert log.write(" it\n").moved
    assert not log.look().moved


def test_a_step_cut_in_the_middle_is_found_when_its_line_is_whole(log) -> None:
    whole = line(5)
    assert not log.write(whole[:14]).moved
    assert log.write(whole[14:]).step == 5


def test_colours_nul_bytes_and_broken_utf8_hide_no_step(tmp_path) -> None:
    log = Follower(tmp_path / "o", "torchtitan")
    coloured = b"[titan] - INFO - \x1b[31mstep: \x1b[1m14  \x1b[32mloss:  3.2\x1b[39m\n"
    assert log.write(b"\xff\xfe\x00" * 50 + coloured).step == 14


def test_a_truncated_and_a_rotated_log_are_read_from_their_beginning(log) -> None:
    log.write(line(8) * 50)
    log.path.write_text(line(9))
    assert log.look().step == 9
    log.path.rename(log.path.with_suffix(".1"))
    log.path.write_text(line(10) * 51)
    assert log.look().step == 10


def test_a_log_that_is_gone_is_not_seen(log) -> None:
    log.write(line(1))
    log.path.unlink()
    assert log.look().unseen == "node-0.log is gone"
    assert log.write(line(2)) == SourceReading(LOG_PATTERN, moved=True, step=2)


def test_a_fifo_in_the_place_of_a_log_is_not_seen(log) -> None:
    os.mkfifo(log.path)
    assert log.look().unseen == "node-0.log: not a regular file"


def test_what_earlier_attempts_left_in_a_shared_log_is_no_progress(log) -> None:
    log.is_whole = False
    log.path.write_text(line(50))
    assert not log.look().moved
    assert log.write(line(20)) == SourceReading(LOG_PATTERN, moved=True, step=20)


def test_of_several_logs_any_one_that_moves_is_enough(log, tmp_path) -> None:
    other = tmp_path / "node-1.log"
    other.write_text(line(6))
    log.write("quiet\n")
    assert log.look(other) == SourceReading(LOG_PATTERN, moved=True, step=6)
    other.unlink()
    assert log.write(line(7)).moved


def test_of_a_backlog_only_the_end_is_read(log) -> None:
    with log.path.open("wb") as file:
        file.truncate(10 << 30)  # 10 GB that hold no byte on disk
        file.seek(0, os.SEEK_END)
        file.write(line(77).encode())
    begun = time.process_time()
    assert log.look().step == 77
    assert time.process_time() - begun < 1


def test_an_end_that_shows_nothing_is_not_called_standing_still_when_the_middle_was_skipped(log) -> None:
    log.write(line(1))
    reading = log.write(line(2).encode() + b"noise\n" * (FILE_BYTES // 6 + 1))
    assert "grew faster than it is read" in reading.unseen
    assert log.write("quiet\n") == SourceReading(LOG_PATTERN)


def test_one_line_of_a_gigabyte_does_not_stay_in_the_way(log) -> None:
    assert not log.write(b"x" * (4 << 20)).moved
    assert log.write("\n" + line(3)).step == 3


@pytest.mark.parametrize(
    ("pattern", "text"), [("(a+)+$", "a" * 1999 + "b\n"), (r"(?:\w+\s?)+\d$", "word " * 399 + "b\n")]
)
def test_an_expression_that_never_ends_is_cut_and_said(tmp_path, monkeypatch, pattern, text) -> None:
    monkeypatch.setattr(following, "LOOK_S", 0.2)
    log = Follower(tmp_path / "o", pattern)
    begun = time.monotonic()
    assert "make it simpler" in log.write(text).unseen
    assert time.monotonic() - begun < 5
    assert "make it simpler" in log.look().unseen  # what was not read through is not forgotten


def test_the_cap_ends_with_what_it_was_for_and_counts_no_waiting() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with time_cap(0.05):
        time.sleep(0.1)
    with pytest.raises(TooSlow), time_cap(0.05):
        re.search(r"(a+)+$", "a" * 100 + "b")  # for ever
    sum(range(10**7))
    assert signal.getsignal(signal.SIGVTALRM) is before


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_no_bytes_are_trouble(tmp_path_factory, pieces) -> None:
    log = Follower(tmp_path_factory.mktemp("log") / "o", r"s(?P<step>\S+)|m(?P<mark>.)|x")
    for piece in pieces:
        reading = log.write(piece)
        assert not reading.unseen
        assert all(known.offset <= known.size_bytes for known in log.known)


# --------------------------------------------------------------------------------------------------------- .beat files


def test_no_beat_files_are_no_source(tmp_path) -> None:
    assert read_beat_files(tmp_path / "none") is None
    (tmp_path / "n1.hb").touch()
    assert read_beat_files(tmp_path) is None


def test_content_and_time_of_a_beat_file_are_its_beat(tmp_path) -> None:
    path = tmp_path / "julia.beat"
    path.write_text("812\n")
    first = read_beat_files(tmp_path)
    assert first is not None
    assert (first.step, first.unseen) == (812, "")
    assert read_beat_files(tmp_path) == first
    os.utime(path, (1, 1))
    touched = read_beat_files(tmp_path)
    path.write_text("813 of 900")
    os.utime(path, (1, 1))
    written = read_beat_files(tmp_path)
    assert written is not None
    assert written.step == 813
    assert len({reading.mark for reading in (first, touched, written)}) == 3


def test_the_step_of_many_beat_files_is_the_highest_and_text_is_none(tmp_path) -> None:
    for name, text in (("a", "5"), ("b", "  7 steps"), ("c", "-9"), ("d", "9" * 40), ("e", "x"), ("f", "")):
        (tmp_path / f"{name}.beat").write_text(text)
    reading = read_beat_files(tmp_path)
    assert reading is not None
    assert reading.step == 7


def test_a_beat_file_that_is_no_file_is_said(tmp_path) -> None:
    os.mkfifo(tmp_path / "n1.beat")
    assert read_beat_files(tmp_path) == SourceReading(BEAT_FILES, unseen="n1.beat: not a regular file")
    (tmp_path / "n1.beat").unlink()
    (tmp_path / "n1.beat").symlink_to("/etc/passwd")
    assert "n1.beat: " in read_beat_files(tmp_path).unseen


# ------------------------------------------------------------------------------------------------------------- memory


def reading_of(step: int | None, *incomplete: str, problem: str = "") -> CheckpointReading:
    newest = None if step is None else Checkpoint(step, Path("/c"))
    return CheckpointReading(newest, incomplete, (problem,) if problem else ())


def test_the_checkpoints_that_are_there_at_first_are_no_progress_and_new_ones_are(tmp_path) -> None:
    spec = CheckpointSpec(directory=tmp_path)
    watch = Watch("7.r0", "e", 0.0)
    ages = []
    for mono, found in enumerate([reading_of(10), reading_of(10), reading_of(10, "step_20"), reading_of(20)], start=1):
        readings, _ = read_sources(RunDir(tmp_path), KEY, ProgressSpec(), (spec, found), None, watch)
        watch = Watch("7.r0", "e", 0.0, sources=advance_sources(watch.sources, readings, float(mono)))
        ages.append(watch.sources[0].moved_mono)
    assert ages == [None, None, 3.0, 4.0]
    assert watch.sources[0].name == CHECKPOINTS
    assert watch.step is None  # that of a checkpoint is not how far this attempt has come


def test_a_source_that_cannot_be_seen_keeps_what_is_known_and_says_since_when() -> None:
    seen = advance_sources((), [SourceReading(BEAT_FILES, mark="a", step=3)], 1.0)
    blind = advance_sources(seen, [SourceReading(BEAT_FILES, unseen="Stale file handle")], 2.0)
    blind = advance_sources(blind, [SourceReading(BEAT_FILES, unseen="Stale file handle")], 3.0)
    assert (blind[0].moved_mono, blind[0].step, blind[0].unseen_since_mono) == (1.0, 3, 2.0)
    again = advance_sources(blind, [SourceReading(BEAT_FILES, mark="a", step=3)], 4.0)
    assert (again[0].moved_mono, again[0].unseen, again[0].unseen_since_mono) == (
        3.0,
        "",
        None,
    )  # still for 1 s, as before
    assert advance_sources(blind, [SourceReading(BEAT_FILES, mark="b")], 4.0)[0].moved_mono == 4.0


def test_a_watcher_that_was_stopped_has_seen_no_silence() -> None:
    seen = advance_sources((), [SourceReading(BEAT_FILES, mark="a")], 1.0)
    assert advance_sources(seen, [SourceReading(BEAT_FILES, mark="a")], 601.0, 590.0)[0].moved_mono == 591.0


def test_beat_files_that_vanish_are_not_seen() -> None:
    seen = advance_sources((), [SourceReading(BEAT_FILES, mark="a")], 1.0)
    assert advance_sources(seen, [], 2.0)[0].unseen == "nothing of it is left"


def test_an_adopted_jobs_log_is_followed_from_the_start_of_its_first_attempt(tmp_path) -> None:
    path = tmp_path / "slurm-7.out"
    path.write_text(line(3))
    spec = ProgressSpec(pattern="megatron")

    def moved(key: AttemptKey) -> bool:
        readings, _ = read_sources(RunDir(tmp_path), key, spec, (CheckpointSpec(), CheckpointReading()), path, None)
        return readings[0].moved

    assert moved(AttemptKey("7"))
    assert not moved(AttemptKey("7", 1))
    assert read_sources(
        RunDir(tmp_path), KEY, spec, (CheckpointSpec(), CheckpointReading()), Path("/dev/null"), None
    ) == (
        (SourceReading(LOG_PATTERN),),
        (),
    )
