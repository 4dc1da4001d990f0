"""The two searches find the same: hyperscan's automaton and the one of Python alone."""

import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.diagnose import scan
from krea_runner.diagnose.scan import Search
from krea_runner.diagnose.signatures import load_catalog

LITERALS = load_catalog().literals
# Beyond the table: digits alone, spaces alone, one that overlaps itself, one that differs from another by its digits only.
AWKWARD = (*LITERALS, b"1234", b"    ", b"ababab", b"exit code 77", b"\xff\xfe\xfd\xfc", b"a b\n")

ONLY_LETTERS = bytes(97 + code % 26 for code in range(256))


def found(search: Search, blocks: list[bytes]) -> list[list[tuple[int, int, list[int]]]]:
    return [[(start, end, sorted(set(ids))) for start, end, ids in search.lines(block)] for block in blocks]


pieces = st.one_of(
    st.sampled_from(AWKWARD),
    st.sampled_from([literal[:-1] for literal in AWKWARD] + [literal[1:] for literal in AWKWARD]),  # near misses
    st.sampled_from(
        [b"\n", b"\n", b" ", b"\r", b"\t", b"\x00", b"\x0b", b"7", b"abab", b"step 3 | loss\n", b"[rank12]: "]
    ),
    st.binary(max_size=8),
)
texts = st.lists(pieces, max_size=30).map(b"".join)


@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 6))
def test_both_searches_hand_out_the_same_lines_also_where_one_literal_storms(blocks: list[bytes], cap: int) -> None:
    pytest.importorskip("hyperscan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CAP", cap)
        fast, plain = Search(AWKWARD, hyperscan=True), Search(AWKWARD, hyperscan=False)
        assert found(fast, blocks) == found(plain, blocks)
        assert [min(count, cap) for count in fast.seen] == [min(count, cap) for count in plain.seen]


def test_lines_of_which_no_two_are_alike_are_forgotten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MOST_HELD_BYTES", 100_000)
    chance = random.Random(1)
    search = Search(LITERALS, hyperscan=False)
    finder = search._find
    assert isinstance(finder, scan._ByShape)
    for number in range(40):
        rows = [chance.randbytes(100).translate(ONLY_LETTERS) for _ in range(100)]
        list(search.lines(b"\n".join([*rows, b"KeyError: %d" % number])))
        assert finder.held_bytes < 100_000 + 2 * 100 * 400
    assert max(search.seen) == 40


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    scan._hyperscan.cache_clear()
    yield
    scan._hyperscan.cache_clear()


@pytest.mark.usefixtures("compiled_anew")
def test_where_hyperscan_cannot_run_the_other_search_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    hyperscan = pytest.importorskip("hyperscan")

    def refuse(*_: object, **__: object) -> None:
        raise hyperscan.HyperscanError("HS_ARCH_ERROR")

    monkeypatch.setattr(hyperscan, "Database", refuse)
    assert found(Search(LITERALS), [b"x\nKeyError: 3\n"]) == found(
        Search(LITERALS, hyperscan=False), [b"x\nKeyError: 3\n"]
    )
    monkeypatch.setitem(sys.modules, "hyperscan", None)
    scan._hyperscan.cache_clear()
    assert len(found(Search(LITERALS), [b"x\nKeyError: 3\n"])[0]) == 1
    with pytest.raises(ImportError, match="not installed"):
        Search(LITERALS, hyperscan=True)
