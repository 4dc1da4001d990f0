"""Which checkpoints may go: never what a run may still need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.decide.retention import Candidate, Kept, retention

STATES = ["whole", "in progress", "unfinished", "broken", "could not see"]
candidates = st.lists(
    st.builds(
        Candidate, name=st.uuids().map(str), step=st.none() | st.integers(0, 50), state=st.sampled_from(STATES),
        value=st.none() | st.floats(-5, 5),
    ),
    max_size=12,
)  # fmt: skip
rules = st.builds(
    Kept, last=st.integers(0, 4), every=st.integers(0, 10), best=st.integers(0, 3), highest=st.booleans(),
    unfinished=st.booleans(),
)  # fmt: skip


def gone(found, kept, **more) -> set[str]:
    return {fate.name for fate in retention(found, kept, **({"protected": {}} | more)) if fate.goes}


@given(candidates, rules, st.sets(st.integers(0, 50), max_size=3))
def test_whatever_the_rules_a_run_can_go_on(found, kept, needed) -> None:
    goes = gone(found, kept, needed=needed)
    whole = sorted(
        (one for one in found if one.state == "whole" and one.step is not None), key=lambda one: -(one.step or 0)
    )
    assert not goes & {one.name for one in whole[:2]}
    for one in found:
        if one.name in goes:
            assert one.state in {"whole", "unfinished"}
            assert one.step not in needed
            assert one.state == "unfinished" or one.step is not None


def steps(*numbers: int) -> list[Candidate]:
    return [Candidate(str(number), number, "whole") for number in numbers]


@pytest.mark.parametrize(
    ("kept", "goes"),
    [
        (Kept(), set()),
        (Kept(last=3), {"10", "20", "30"}),
        (Kept(last=1), {"10", "20", "30", "40"}),
        (Kept(every=20), {"10", "30"}),
        (Kept(last=3, every=30), {"10", "20"}),
    ],
)
def test_each_rule_keeps_what_it_says(kept, goes) -> None:
    assert gone(steps(10, 20, 30, 40, 50, 60), kept) == goes


@pytest.mark.parametrize(("highest", "goes"), [(False, {"20", "30"}), (True, {"10", "30"})])
def test_the_best_are_kept_and_one_of_unknown_worth_too(highest, goes) -> None:
    worth = {10: 0.1, 20: 0.9, 30: 0.5, 40: None, 50: 0.5, 60: 0.5}
    found = [Candidate(str(step), step, "whole", value) for step, value in worth.items()]
    assert gone(found, Kept(best=1, highest=highest)) == goes


def test_half_written_ones_go_only_when_asked() -> None:
    found = [*steps(10, 20), Candidate("x", 5, "unfinished")]
    assert gone(found, Kept(last=1)) == set()
    assert gone(found, Kept(last=1, unfinished=False)) == {"x"}


def test_after_a_step_back_the_two_that_are_left_to_it_stay() -> None:
    found = [Candidate(f"step_{step}", step, "whole") for step in (10, 20, 30, 40)]
    assert gone(found, Kept(last=1), left={"step_40"}) == {"step_10"}
    assert gone(found, Kept(last=1), left={"step_40", "step_30"}) == {"step_30"}
    assert gone(found, Kept(last=1)) == {"step_10", "step_20"}
