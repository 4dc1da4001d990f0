"""The reader of heartbeats against everything that may lie in that directory."""

import os
import socket
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krea_runner.heartbeat import FORMAT, MAX_LOCAL_RANKS, SLOT
from krea_runner.model import HeartbeatReading
from krea_runner.observe.heartbeats import read_heartbeats

ATTEMPT = "41.r2"


def sealed(body: bytes) -> bytes:
    """`body` as a slot whose checksum is right."""
    padded = body.ljust(SLOT - 14)[: SLOT - 14]
    return padded + b" crc=%08x\n" % zlib.crc32(padded)


def slot(rank: int, local: int = 0, *, attempt: str = ATTEMPT, flush: int = 9, **changes: str) -> bytes:
    values = {"beat": "7", "step": "5", "phase": "step", "budget": "-", "pid": "77", "at": "1800000000.250"} | changes
    tail = "step={step} phase={phase} budget={budget} pid={pid} at={at}".format(**values)
    return sealed(
        f"{FORMAT} rank={rank} local={local} attempt={attempt} beat={values['beat']} flush={flush} {tail}".encode()
    )


def ranks_of(directory: Path) -> list[int]:
    return [beat.rank for beat in read_heartbeats(directory, ATTEMPT).ranks]


def only_problem(directory: Path) -> str:
    reading = read_heartbeats(directory, ATTEMPT)
    assert reading.ranks == ()
    (problem,) = reading.problems
    assert problem.isprintable()
    return problem


def test_a_missing_directory_is_an_empty_reading(tmp_path) -> None:
    assert read_heartbeats(tmp_path / "none", ATTEMPT) == HeartbeatReading()


def test_a_directory_that_cannot_be_listed_is_a_problem_not_an_empty_reading(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert "could not list heartbeats" in only_problem(tmp_path / "file")


def test_every_field_is_read(tmp_path) -> None:
    (tmp_path / "gpu-07.hb").write_bytes(slot(12, budget="5400", phase="checkpoint", step="-1"))
    reading = read_heartbeats(tmp_path, ATTEMPT)
    assert reading.problems == ()
    (beat,) = reading.ranks
    assert (beat.rank, beat.local_rank, beat.node, beat.beat, beat.flush) == (12, 0, "gpu-07", 7, 9)
    assert (beat.step, beat.phase, beat.phase_budget_s) == (-1, "checkpoint", 5400.0)
    assert (beat.pid, beat.wall_at) == (77, 1800000000.25)


def test_ranks_come_in_order_whatever_their_files_are_called(tmp_path) -> None:
    (tmp_path / "a.hb").write_bytes(slot(10) + slot(2, 1))
    (tmp_path / "b.hb").write_bytes(slot(3) + slot(0, 1))
    assert ranks_of(tmp_path) == [0, 2, 3, 10]


def test_slots_nobody_has_written_yet_are_no_problem(tmp_path) -> None:
    (tmp_path / "n1.hb").write_bytes(bytes(2 * SLOT) + slot(2, 2))
    (tmp_path / "n2.hb").write_bytes(b"")
    assert read_heartbeats(tmp_path, ATTEMPT).problems == ()
    assert ranks_of(tmp_path) == [2]


@pytest.mark.parametrize("kept", [1, 100, SLOT - 14, SLOT - 1])
def test_a_torn_slot_is_named_and_costs_only_itself(tmp_path, kept) -> None:
    (tmp_path / "n1.hb").write_bytes(slot(0) + slot(1, 1)[:kept])
    reading = read_heartbeats(tmp_path, ATTEMPT)
    assert [beat.rank for beat in reading.ranks] == [0]
    assert reading.problems == ("n1.hb slot 1: torn, or not a heartbeat",)


def test_a_slot_mixed_of_two_writes_is_torn(tmp_path) -> None:
    old, new = slot(0, beat="100"), slot(0, beat="999")
    (tmp_path / "n1.hb").write_bytes(new[:128] + old[128:])
    assert "torn" in only_problem(tmp_path)


def test_binary_content_is_torn(tmp_path) -> None:
    (tmp_path / "n1.hb").write_bytes(bytes(range(256)))
    assert "torn" in only_problem(tmp_path)


def test_foreign_names_are_ignored(tmp_path) -> None:
    for name in ("n1.hb~", ".n1.hb.swp", "n1", "core.77", "n1.HB", ".nfs000001"):
        (tmp_path / name).write_bytes(b"anything")
    assert read_heartbeats(tmp_path, ATTEMPT) == HeartbeatReading()


@pytest.mark.parametrize("stale", ["41.r1", "41.r22", "4.r2", "41.r2.l1"])
def test_a_slot_of_another_attempt_is_named_and_never_counted(tmp_path, stale) -> None:
    (tmp_path / "n1.hb").write_bytes(slot(0, attempt=stale))
    assert only_problem(tmp_path) == f"n1.hb slot 0: of attempt {stale}, not {ATTEMPT}: ignored"


def test_a_slot_in_another_ranks_place_is_not_counted(tmp_path) -> None:
    (tmp_path / "n1.hb").write_bytes(slot(0, 1))
    assert only_problem(tmp_path) == "n1.hb slot 0: says it is local rank 1"


@pytest.mark.parametrize("flushes", [(4, 9), (9, 4), (9, 9)])
def test_a_rank_in_two_files_is_said_and_the_livelier_one_counts(tmp_path, flushes) -> None:
    for name, flush in zip(("a.hb", "b.hb"), flushes, strict=True):
        (tmp_path / name).write_bytes(slot(0, flush=flush))
    reading = read_heartbeats(tmp_path, ATTEMPT)
    assert [beat.flush for beat in reading.ranks] == [9]
    assert reading.problems == ("b.hb slot 0: rank 0 is in another slot too",)


@pytest.mark.parametrize(
    "body",
    [
        b"khb2 rank=0 local=0 attempt=41.r2 beat=1",
        b"",
        slot(0, phase="\x1b[31mred")[: SLOT - 14],
        slot(0, phase="two words")[: SLOT - 14],
        slot(0, attempt="41.r\xe92")[: SLOT - 14],
        slot(0, budget="1e999")[: SLOT - 14],
        slot(0, budget="e.e")[: SLOT - 14],
        slot(0, budget="-3")[: SLOT - 14],
        slot(0, at="nan")[: SLOT - 14],
        slot(0, step="-2")[: SLOT - 14],
        slot(0, beat="9" * 19)[: SLOT - 14],
    ],
)
def test_a_right_checksum_makes_no_wrong_record_right(tmp_path, body) -> None:
    (tmp_path / "n1.hb").write_bytes(sealed(body))
    assert only_problem(tmp_path).startswith("n1.hb slot 0: ")


# ------------------------------------------------------------------------------------------ what is no ordinary file


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link(path: Path) -> None:
    real = path.with_suffix(".real")
    real.write_bytes(slot(0))
    path.symlink_to(real)


def put_directory(path: Path) -> None:
    path.mkdir()


def put_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is at most 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(before)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("put", [put_fifo, put_link, put_directory, put_socket])
def test_what_is_no_ordinary_file_is_named_and_does_not_block(tmp_path, put) -> None:
    put(tmp_path / "x.hb")
    assert only_problem(tmp_path).startswith("x.hb: ")


@pytest.mark.timeout(30)
def test_a_huge_file_is_read_only_as_far_as_slots_may_reach(tmp_path) -> None:
    path = tmp_path / "n1.hb"
    path.write_bytes(slot(0))
    with path.open("r+b") as file:
        file.seek(MAX_LOCAL_RANKS * SLOT)
        file.write(slot(MAX_LOCAL_RANKS, MAX_LOCAL_RANKS))
        file.truncate(10 << 30)
    reading = read_heartbeats(tmp_path, ATTEMPT)
    assert [beat.rank for beat in reading.ranks] == [0]
    assert reading.problems == ()


def test_a_file_that_may_not_be_read_is_a_problem(tmp_path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = tmp_path / "n1.hb"
    path.write_bytes(slot(0))
    path.chmod(0)
    assert "Permission denied" in only_problem(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        b"a\nb",
        b"\x1b[31mred",
        b"\xff\xfe",
        "gr\u00fcn".encode(),
        b"a b",
        b"",
        "\u202eevil".encode(),
        b"n" * 65,
        b"a'\"b",
    ],
)
def test_a_hostile_file_name_is_shown_harmlessly_and_becomes_no_node(tmp_path, name) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name + b".hb")).write_bytes(slot(0))
    problem = only_problem(tmp_path)
    assert problem.isascii() or repr(os.fsdecode(name))[1:-1] in problem
    assert problem.endswith("not named after a node")


# ------------------------------------------------------------------------------------------------------- any content


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("any")


def check(reading: HeartbeatReading) -> None:
    for problem in reading.problems:
        assert problem.isprintable(), problem
    for beat in reading.ranks:
        assert beat.phase.isprintable()


@given(data=st.binary(max_size=4 * SLOT))
def test_no_content_makes_the_reader_raise(place, data) -> None:
    (place / "n1.hb").write_bytes(data)
    check(read_heartbeats(place, ATTEMPT))


words = st.binary(min_size=1, max_size=30)


@given(attempt=words, phase=words, budget=st.one_of(words, st.from_regex(rb"[0-9.e+-]{1,16}", fullmatch=True)))
def test_no_content_with_a_right_checksum_makes_the_reader_raise(place, attempt, phase, budget) -> None:
    body = b"khb1 rank=0 local=0 attempt=%s beat=1 flush=1 step=1 phase=%s budget=%s pid=1 at=1.000"
    (place / "n1.hb").write_bytes(sealed(body % (attempt, phase, budget)))
    check(read_heartbeats(place, attempt.decode("latin-1")))


@settings(max_examples=400)
@given(position=st.integers(0, 2 * SLOT - 1), flip=st.integers(1, 255))
def test_one_changed_byte_never_makes_another_record(place, position, flip) -> None:
    data = bytearray(slot(0) + slot(1, 1))
    (place / "n1.hb").write_bytes(data)
    whole = read_heartbeats(place, ATTEMPT)
    assert len(whole.ranks) == 2
    data[position] ^= flip
    (place / "n1.hb").write_bytes(data)
    changed = read_heartbeats(place, ATTEMPT)
    assert changed.ranks == tuple(beat for beat in whole.ranks if beat.local_rank != position // SLOT)
    assert len(changed.problems) == 1
