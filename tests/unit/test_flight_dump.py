"""Flight Recorder dumps are pickles from a machine that failed: nothing in them is run, and nothing but DumpError comes out."""

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.diagnose.flight_dump import DumpError, load_pickle, parse_dump

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
    assert load_pickle(pickle.dumps(PLAIN, protocol)) == PLAIN


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_crafted_pickle_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    crafted = pickle.dumps([PLAIN, RunsACommand(tmp_path / "ran")], protocol)
    with pytest.raises(DumpError):
        load_pickle(crafted)
    assert not (tmp_path / "ran").exists()


def test_a_truncated_dump_is_an_error() -> None:
    whole = pickle.dumps(PLAIN)
    for length in range(len(whole)):
        with pytest.raises(DumpError):
            load_pickle(whole[:length])


@given(st.binary(max_size=200), st.integers(0, 120), st.integers(0, 255))
def test_nothing_but_our_own_error_comes_of_any_bytes(data: bytes, position: int, byte: int) -> None:
    damaged = bytearray(pickle.dumps(PLAIN))
    damaged[position % len(damaged)] = byte
    for candidate in (data, bytes(damaged)):
        try:
            parse_dump(candidate, 0, name="dump")
        except DumpError:
            continue
