"""Which rank is blamed for a hang, in which words, from heartbeats alone."""

import dataclasses

import pytest

from krea_runner.diagnose.hang import judge_hang
from krea_runner.model import Gang

ALL = {0, 1, 2, 3}


def found(snapshot):
    finding = judge_hang(snapshot).finding
    assert finding is not None
    return finding


def test_a_rank_that_has_beaten_more_often_because_it_saves_for_all_leaves_nobody_else_blamed(gang) -> None:
    gang.change(0, beat=500)
    gang.pass_time(5, beating=ALL)
    finding = found(gang.pass_time(12))
    assert (finding.cause, finding.suspects) == ("loop_stuck", ())
    assert "the whole gang stuck in the same place" in finding.summary


def test_the_rank_that_does_something_else_is_named_and_so_are_those_that_wait(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.change(3, phase="evaluation")
    finding = found(gang.pass_time(60))
    assert "rank 3 on n2 stuck in evaluation, 3 others wait in step" in finding.summary


def test_the_rank_that_is_a_step_behind_is_named(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.pass_time(1, beating={0, 1, 3})
    assert "rank 2 on n2 stopped stepping first, 3 others wait at step 11" in found(gang.pass_time(12)).summary


def test_at_the_same_step_the_rank_that_froze_first_is_named(gang) -> None:
    gang.change(*ALL, phase="evaluation")
    gang.pass_time(5, beating=ALL)
    for _ in range(8):
        gang.pass_time(1, beating={0, 1, 2})
        gang.change(*ALL, step=10)
    assert "rank 3 on n2 stopped beating first, 3 others wait later" in found(gang.pass_time(60)).summary


@pytest.mark.parametrize(
    ("flushing", "cause", "words"),
    [
        ({0, 1, 3}, "rank_stopped", "rank 2 on n2 stopped: neither beats nor flushes"),
        ({0, 1}, "node_silent", "ranks 2,3 on n2 silent as a whole node"),
        ({1}, "rank_stopped", "ranks 0,2,3 on n1,n2 stopped: neither beats nor flushes"),
        (set(), "all_silent", "the whole gang all silent (processes stopped, or the file system)"),
        (ALL, "loop_stuck", "the whole gang stuck in the same place"),
    ],
)
def test_a_rank_a_node_and_everyone_silent_are_told_apart(gang, flushing, cause, words) -> None:
    gang.pass_time(5, beating=ALL, logging=True)
    finding = found(gang.pass_time(25, flushing=flushing))
    assert finding.cause == cause
    assert words in finding.summary


def test_the_only_rank_of_a_node_may_be_the_process_or_the_node_and_it_is_said(gang) -> None:
    gang.hidden = frozenset({3})
    gang.pass_time(5, beating=ALL)
    finding = found(gang.pass_time(25, flushing={0, 1}))
    assert "rank 2 on n2 stopped, the process or its node" in finding.summary


def test_a_thousand_silent_ranks_are_told_in_one_line(gang) -> None:
    first = gang.beats[0]
    for rank in range(1024):
        gang.beats[rank] = dataclasses.replace(first, rank=rank, node=f"n{rank // 8:03}", local_rank=rank % 8)
    config = dataclasses.replace(gang.run.config, gang=Gang(128, 8))
    gang.run = dataclasses.replace(gang.run, config=config)
    gang.pass_time(3, beating=set(range(1024)))
    finding = found(gang.pass_time(25, flushing=set(range(512))))
    assert finding.summary.startswith(
        "hang: ranks 512,513,514,515,… (512) on n064,n065,n066,n067,… (64) silent as 64 whole nodes, no progress for"
    )
    assert len(finding.summary) < 200


def test_a_node_whose_file_is_shown_late_is_not_called_silent(gang) -> None:
    """Its flush arrives in lumps of 8 s, which was seen while all went well."""
    for _ in range(10):
        gang.pass_time(7, beating={0, 1}, flushing={0, 1})
        gang.change(2, 3, beat=gang.beats[0].beat, flush=gang.beats[0].flush, step=gang.beats[0].step)
    gang.pass_time(4, flushing={0, 1}, logging=True)
    finding = found(lumped(gang))
    assert finding.cause == "loop_stuck"


def lumped(gang):
    snapshot = gang.pass_time(3, flushing={0, 1})
    for _ in range(3):
        gang.change(2, 3, flush=gang.beats[0].flush)
        snapshot = gang.pass_time(7, flushing={0, 1})
    return snapshot
