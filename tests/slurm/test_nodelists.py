"""Node lists of every shape, with `scontrol show hostnames` and `show hostlist` for the oracle."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krea_runner.proc import run
from krea_runner.schedulers.nodelist import NodelistError, expand, fold

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

_number = st.integers(0, 120).flatmap(lambda n: st.integers(1, 5).map(lambda width: str(n).zfill(width)))
_range = st.one_of(_number, st.tuples(_number, st.integers(0, 6)).map(lambda t: f"{t[0]}-{int(t[0]) + t[1]}"))
_bracket = st.lists(_range, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
_word = st.one_of(st.just(""), st.text("abrR.-_01", max_size=3))
# Brackets at the beginning, in the middle, side by side, one to three of them; a number or letters after the last.
_group = st.tuples(
    _word, st.lists(st.tuples(_bracket, _word).map("".join), max_size=3).map("".join), st.one_of(_number, st.just("")),
).map("".join)  # fmt: skip
_shapes = st.lists(_group, min_size=1, max_size=4).map(",".join)
_scraps = st.lists(
    st.sampled_from(["n", "0", "12", "-", ",", "[1-2]", "[03]", "[]", "[a]", "[2-1]", "x."]), max_size=8
).map("".join)
# scontrol takes a name that begins with - for an option; of a bracket without its other half Slurm makes names (`n[` is `n]`).
_lists = st.one_of(_shapes, _shapes, _scraps).filter(lambda text: text != "" and not re.search(r"(^|,)-", text))

# Slurm 22.05 refuses what 24.11 reads: something after the last bracket of a name.
_SUFFIX = re.compile(r"\][^,\[\]]+(,|$)")
ORACLE = """\
for list; do
  names=$(scontrol show hostnames "$list" 2>&1) && printf '%s' "$names" && [ -n "$names" ] &&
    { printf '\\036'; scontrol show hostlist "$(printf '%s' "$names" | paste -sd,)"; }
  printf '\\035'
done
"""


@pytest.fixture(scope="module")
def cluster(slurm_cluster) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm_cluster.env.items():
            patch.setenv(name, value)
        yield


def ask(*lists: str) -> list[tuple[list[str] | None, str]]:
    """Slurm's names (None: it refuses) and how it folds them."""
    done = run(["sh", "-c", ORACLE, "sh", *lists], timeout_s=60)
    answers = [answer.partition("\x1e") for answer in done.stdout.split("\x1d")[:-1]]
    assert len(answers) == len(lists), done.stderr
    # Of several brackets it says `error: ... Invalid range` and goes on with the others (22.05.8).
    refused = ["Invalid hostlist" in names or "error:" in names for names, _, _ in answers]
    read = [(names.split(), folded.strip()) for names, _, folded in answers]
    return [(None, "") if bad else answer for bad, answer in zip(refused, read, strict=True)]


def ours(text: str) -> list[str] | None:
    try:
        return expand(text)
    except NodelistError:
        return None


# Another seed each time, on a machine of CI too; what fails is reported shrunk, with the line that brings it back.
@settings(max_examples=25, derandomize=False, print_blob=True, suppress_health_check=list(HealthCheck))
@given(lists=st.lists(_lists, min_size=1, max_size=12))
def test_node_lists_are_read_and_written_as_scontrol_does_it(cluster: None, lists: list[str]) -> None:
    for text, (names, folded) in zip(lists, ask(*lists), strict=True):
        if names is None and _SUFFIX.search(text):
            continue
        assert ours(text) == names, text
        if names:
            assert fold(names) == folded, text


LIMITS = [
    "n[0-65535]",
    "n[1-65537]",
    "r[1-300]n[1-300]",
    "n[4294967295-4294967297]",
    "n[0000000000000000000000000001-2]",
]


@pytest.mark.parametrize("text", LIMITS)
def test_a_long_list_ends_where_slurms_ends(cluster: None, text: str) -> None:
    done = run(["scontrol", "show", "hostnames", text], timeout_s=60)
    assert ours(text) == (None if "Invalid hostlist" in done.stderr else done.stdout.split())


REFUSED = ["n[3-1]", "n[a]", "n[]", "n[1,]", "n[1--2]"]


@pytest.mark.parametrize("text", REFUSED)
def test_what_scontrol_refuses_is_refused(cluster: None, text: str) -> None:
    assert (ask(text), ours(text)) == ([(None, "")], None)
