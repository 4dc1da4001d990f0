"""Flight Recorder dumps are pickles from a machine that failed: nothing in them is run, and nothing but DumpError comes out."""

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.diagnose.flight_dump import DumpError, parse_dump
from krea_runner.diagnose.plain_pickle import PickleError, load_plain

PLAIN = {
    "version": "2.10",
    "entries": [{"collective_seq_id": 4, "state": "scheduled", "sizes": [[3, 4]]}],
    "pg_config": {},
}


class RunsACommand:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read_as_pickle_reads_it(protocol: int) -> None:
    assert load_plain(pickle.dumps(PLAIN, protocol)) == PLAIN


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_crafted_pickle_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    crafted = pickle.dumps([PLAIN, RunsACommand(tmp_path / "ran")], protocol)
    with pytest.raises(PickleError):
        load_plain(crafted)
    assert not (tmp_path / "ran").exists()


def test_a_truncated_dump_is_an_error() -> None:
    whole = pickle.dumps(PLAIN)
    for length in range(len(whole)):
        with pytest.raises(PickleError):
            load_plain(whole[:length])


@given(st.binary(max_size=200), st.integers(0, 120), st.integers(0, 255))
def test_nothing_but_our_own_error_comes_of_any_bytes(data: bytes, position: int, byte: int) -> None:
    damaged = bytearray(pickle.dumps(PLAIN))
    damaged[position % len(damaged)] = byte
    for candidate in (data, bytes(damaged)):
        try:
            parse_dump(candidate, 0, name="dump")
        except DumpError:
            continue


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x02Nr\xff\xff\xff\xff.", "LONG_BINPUT of 64 GB"),
        (b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.", "a nested tuple as a key, whose hash overflows the C stack"),
        (b"\x80\x02})" + b"q\x00h\x00\x86" * 70 + b"Ns.", "a key of 2**70 parts"),
        (b"\x80\x02}(K\x01Nu.", "a number as a key"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "a persistent id"),
        (b"\x80\x02](X\x01\x00\x00\x00aNu.", "an item of what is no table"),
    ],
)
def test_a_pickle_made_to_exhaust_its_reader_is_an_error_at_once(data: bytes, why: str) -> None:
    with pytest.raises(PickleError):
        load_plain(data)
    assert why


def test_tuples_come_as_lists_and_shared_values_stay_shared() -> None:
    stack = [{"name": "f"}]
    assert load_plain(pickle.dumps([(), (1,), (1, "a"), (1, 2, None), (1, 2, 3, -4.5), {"k": stack, "l": stack}], 2)) == [
        [], [1], [1, "a"], [1, 2, None], [1, 2, 3, -4.5], {"k": stack, "l": stack},
    ]  # fmt: skip
