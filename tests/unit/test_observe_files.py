"""What is read of checkpoints, logs and the batch script's events, whole, broken or hostile."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.model import AttemptKey, CheckpointReading, CheckpointSpec, LogReading, ScriptEnd
from krea_runner.observe.checkpoints import read_checkpoints
from krea_runner.observe.logs import TAIL_BYTES, attempt_marker, printable, read_logs, read_script_end
from krea_runner.rundir import RunDir

# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def spec(tmp_path) -> CheckpointSpec:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    return CheckpointSpec(directory=directory)


def save(spec: CheckpointSpec, name: str, whole: bool = True) -> Path:
    assert spec.directory is not None
    path = spec.directory / name
    path.mkdir()
    if whole:
        (path / spec.complete).touch()
    return path


def test_the_newest_whole_checkpoint_is_by_number_not_by_name(spec) -> None:
    for step in (9, 10, 100):
        save(spec, f"step_{step}")
    reading = read_checkpoints(spec)
    assert reading.newest is not None
    assert (reading.newest.step, reading.newest.path) == (100, spec.directory / "step_100")
    assert (reading.incomplete, reading.problems) == ((), ())


def test_half_written_checkpoints_are_listed_and_never_the_newest(spec) -> None:
    save(spec, "step_10", whole=False)
    save(spec, "step_20")
    save(spec, "step_30", whole=False)
    save(spec, "step_40", whole=False)
    reading = read_checkpoints(spec)
    assert reading.newest is not None
    assert reading.newest.step == 20
    assert reading.incomplete == ("step_40", "step_30")


def test_with_nothing_whole_there_is_no_newest(spec) -> None:
    save(spec, "step_10", whole=False)
    assert read_checkpoints(spec) == CheckpointReading(incomplete=("step_10",))


def test_a_marker_that_is_no_file_makes_nothing_whole(spec) -> None:
    (save(spec, "step_10", whole=False) / "COMPLETE").mkdir()
    os.mkfifo(save(spec, "step_20", whole=False) / "COMPLETE")
    (spec.directory / "step_30").write_text("a file where a directory is meant")
    assert read_checkpoints(spec) == CheckpointReading(incomplete=("step_30", "step_20", "step_10"))


def test_without_a_marker_the_name_is_enough(spec) -> None:
    spec = CheckpointSpec(directory=spec.directory, pattern="model-{step}.pt", complete="")
    for name in ("model-5.pt", "model-7.pt", "model-9.pt.tmp"):
        (spec.directory / name).touch()
    reading = read_checkpoints(spec)
    assert reading.newest is not None
    assert reading.newest.step == 7


def test_names_that_do_not_match_are_no_checkpoints(spec) -> None:
    names = ["step_", "step_-1", "step_1.tmp", "xstep_1", "step_1\n", "\x1b[31mstep_1", "step_१", "step_" + "9" * 19]
    for name in [*names, "latest", "\udcff"]:
        save(spec, name)
    assert read_checkpoints(spec) == CheckpointReading()


def test_a_pattern_is_text_not_an_expression(spec) -> None:
    spec = CheckpointSpec(directory=spec.directory, pattern="s.*[{step}]+")
    save(spec, "s.*[5]+")
    save(spec, "sxx[7]]")
    reading = read_checkpoints(spec)
    assert reading.newest is not None
    assert (reading.newest.step, reading.incomplete) == (5, ())


def test_a_missing_directory_holds_none_and_is_no_problem(tmp_path) -> None:
    assert read_checkpoints(CheckpointSpec(directory=tmp_path / "none")) == CheckpointReading()
    assert read_checkpoints(CheckpointSpec(directory=None)) == CheckpointReading()


def test_a_directory_that_cannot_be_listed_is_a_problem(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    reading = read_checkpoints(CheckpointSpec(directory=tmp_path / "file"))
    assert reading.newest is None
    assert "Not a directory" in reading.problems[0]


def test_a_checkpoint_that_cannot_be_looked_into_is_a_problem_not_incomplete(spec) -> None:
    save(spec, "step_10")
    (save(spec, "step_20", whole=False) / "COMPLETE").symlink_to("COMPLETE")  # stat says ELOOP, to root too
    reading = read_checkpoints(spec)
    assert (reading.newest, reading.incomplete) == (None, ())
    assert "could not look at checkpoint" in reading.problems[0]


def test_a_checkpoint_of_somebody_else_is_a_problem_not_incomplete(spec) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = save(spec, "step_10")
    path.chmod(0)
    try:
        assert "Permission denied" in read_checkpoints(spec).problems[0]
    finally:
        path.chmod(0o755)


# -------------------------------------------------------------------------------------------------------------- logs

KEY = AttemptKey("41", 2)


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.attempt_logs(KEY).mkdir(parents=True)
    run_dir.events.mkdir()
    return run_dir


def test_logs_that_are_not_there_yet_have_no_size(tmp_path) -> None:
    assert read_logs(RunDir(tmp_path / "none"), KEY) == LogReading()


def test_the_size_is_that_of_all_logs_of_the_attempt(run_dir) -> None:
    run_dir.batch_log("41").write_bytes(b"x" * 10)
    (run_dir.attempt_logs(KEY) / "node-0.log").write_bytes(b"x" * 200)
    (run_dir.attempt_logs(KEY) / "node-1.log").write_bytes(b"x" * 3000)
    other = run_dir.attempt_logs(AttemptKey("41", 1))
    other.mkdir()
    (other / "node-0.log").write_bytes(b"x" * 40000)
    assert read_logs(run_dir, KEY).size_bytes == 3210


def test_only_what_the_attempt_wrote_is_its_tail(run_dir) -> None:
    parts = [f"{attempt_marker(AttemptKey('41', count))}on n1\nsays {count}\n" for count in range(4)]
    run_dir.batch_log("41").write_text("prolog\n" + "".join(parts))
    assert read_logs(run_dir, KEY).tail == parts[2]
    assert read_logs(run_dir, AttemptKey("41", 3)).tail == parts[3]


def test_a_longer_attempt_name_is_not_mistaken_for_a_shorter_one(run_dir) -> None:
    run_dir.batch_log("41").write_text(f"{attempt_marker(AttemptKey('41', 22))}on n1\nnot mine\n")
    assert read_logs(run_dir, KEY).tail == ""


def test_control_characters_never_reach_the_reader(run_dir) -> None:
    hostile = b"\x1b]0;title\x07\x1b[2J\rover\x00\x9b31m\xc2\x9b31m\xff\xe2\x80\xae\xe2\x80\xa8end\ttab\n"
    run_dir.batch_log("41").write_bytes(attempt_marker(KEY).encode() + hostile)
    tail = read_logs(run_dir, KEY).tail
    assert tail.endswith("end\ttab\n")
    assert all(character.isprintable() or character in "\t\n\ufffd" for character in tail)
    assert tail.count("\n") == 1


@given(st.text(st.characters()))
def test_printable_text_can_be_printed_anywhere(text) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not {*shown} & {*map(chr, [*range(9), *range(11, 32), *range(127, 160)]), "\u2028", "\u2029", "\u202e"}
    assert len(shown.splitlines()) <= shown.count("\n") + 1
    assert shown.encode().decode() == shown


def test_ordinary_text_stays_as_it_is() -> None:
    assert printable("loss 1.25 — Übung 学習 🙂\n\tok") == "loss 1.25 — Übung 学習 🙂\n\tok"


@pytest.mark.timeout(30)
def test_only_the_end_of_a_huge_log_is_read(run_dir) -> None:
    end = f"\n{attempt_marker(KEY)}on n1\nsrun: error\n".encode()
    with run_dir.batch_log("41").open("wb") as file:
        file.seek(1 << 30)
        file.write(end)
    reading = read_logs(run_dir, KEY)
    assert reading.size_bytes == (1 << 30) + len(end)
    assert reading.tail == end[1:].decode()


def test_the_tail_is_bounded(run_dir) -> None:
    run_dir.batch_log("41").write_text("x" * TAIL_BYTES + attempt_marker(KEY) + "y" * (TAIL_BYTES - 100))
    assert TAIL_BYTES - 100 < len(read_logs(run_dir, KEY).tail) <= TAIL_BYTES


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_directory(path: Path) -> None:
    path.mkdir()


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


odd = pytest.mark.parametrize("put", [put_fifo, put_directory, put_device])


@pytest.mark.timeout(30)
@odd
def test_what_is_no_ordinary_log_is_a_problem_and_does_not_block(run_dir, put: Callable[[Path], None]) -> None:
    put(run_dir.batch_log("41"))
    reading = read_logs(run_dir, KEY)
    assert (reading.size_bytes, reading.tail) == (0, "")
    (problem,) = reading.problems
    assert "batch-41.log" in problem
    assert problem.isprintable()


@pytest.mark.timeout(30)
def test_a_fifo_among_the_nodes_logs_does_not_block(run_dir) -> None:
    os.mkfifo(run_dir.attempt_logs(KEY) / "node-0.log")
    (run_dir.attempt_logs(KEY) / "node-1.log").write_text("four")
    assert read_logs(run_dir, KEY) == LogReading(size_bytes=4)


# ------------------------------------------------------------------------------------------------------ attempt_end

END = '{"event":"attempt_end","exit_code":137,"at":1800000000.5}\n'


def test_the_scripts_last_word_is_its_exit_code(run_dir) -> None:
    start = json.dumps({"event": "attempt_start", "at": 1.0})
    run_dir.script_events(KEY).write_text(f"{start}\n{END}")
    assert read_script_end(run_dir, KEY) == ScriptEnd(exit_code=137, at=1800000000.5)


def test_without_a_last_word_nothing_is_known(run_dir) -> None:
    assert read_script_end(run_dir, KEY) is None
    run_dir.script_events(KEY).write_text('{"event":"attempt_start","at":1}\n')
    assert read_script_end(run_dir, KEY) is None


@pytest.mark.parametrize("kept", range(1, len(END) - 1, 7))
def test_a_torn_last_word_is_no_last_word(run_dir, kept) -> None:
    run_dir.script_events(KEY).write_text('{"event":"attempt_start","at":1}\n' + END[:kept])
    assert read_script_end(run_dir, KEY) is None


HOSTILE = [
    "[]",
    "7",
    "null",
    '"attempt_end"',
    "{}",
    "[" * 60_000,
    "\x00\xff",
    '{"event":"attempt_end"}',
    '{"event":"attempt_end","exit_code":null,"at":1}',
    '{"event":"attempt_end","exit_code":Infinity,"at":1}',
    '{"event":"attempt_end","exit_code":NaN,"at":1}',
    '{"event":"attempt_end","exit_code":1,"at":1' + "0" * 400 + "}",
    '{"event":"attempt_end","exit_code":1' + "0" * 5000 + ',"at":1}',
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_is_no_event_is_passed_over(run_dir, line) -> None:
    run_dir.script_events(KEY).write_bytes(END.encode() + line.encode("latin-1") + b"\n")
    assert read_script_end(run_dir, KEY) == ScriptEnd(exit_code=137, at=1800000000.5)


@pytest.mark.timeout(30)
@odd
def test_events_that_are_no_ordinary_file_say_nothing_and_do_not_block(run_dir, put) -> None:
    put(run_dir.script_events(KEY))
    assert read_script_end(run_dir, KEY) is None


@pytest.fixture(scope="module")
def shared_run_dir(tmp_path_factory) -> RunDir:
    run_dir = RunDir(tmp_path_factory.mktemp("any"))
    run_dir.events.mkdir()
    run_dir.logs.mkdir()
    return run_dir


@given(data=st.binary(max_size=2000))
def test_no_content_makes_the_readers_raise(shared_run_dir, data) -> None:
    shared_run_dir.script_events(KEY).write_bytes(data)
    shared_run_dir.batch_log("41").write_bytes(attempt_marker(KEY).encode() + data)
    read_script_end(shared_run_dir, KEY)
    assert read_logs(shared_run_dir, KEY).problems == ()
