"""Who kept the others waiting: against what was recorded, against the truth of runs played on paper, and against PyTorch's own
analyser where it can read the dumps. Where the two differ, a test says why."""

import argparse
import logging
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krea_runner.diagnose.flight_dump import DumpError, parse_dump
from krea_runner.diagnose.flight_recorder import FlightRecorderVerdict, analyse_dumps, analyse_flight_recorder
from tests.flight_dumps import (
    DEFAULT,
    GROUPS,
    RECORDED,
    Asked,
    Dumps,
    Fault,
    Step,
    as_nccl,
    of_first_release,
    overflowed,
    play,
    recorded,
    send_or_receive,
    write,
)

SCENARIOS = sorted(path.name for path in RECORDED.iterdir())


def ours(dumps: Dumps) -> FlightRecorderVerdict:
    return analyse_dumps([parse_dump(pickle.dumps(dump, 2), rank) for rank, dump in dumps.items()])


# ------------------------------------------------------------------------------------------------ recorded

ANSWERS: dict[str, tuple[str, str, int | None, tuple[int, ...]]] = {
    "healthy": ("healthy", "", None, ()),
    "behind": ("missing_ranks", "0:default_pg", 4, (2,)),
    "ring": ("missing_ranks", "0:default_pg", 21, (2,)),
    "op": ("mismatch", "0:default_pg", 4, (1,)),
    "sizes": ("mismatch", "0:default_pg", 4, (1,)),
    "dtypes": ("mismatch", "0:default_pg", 4, (1,)),
    "pairs": ("mismatch", "3:data", 2, (3,)),
    # gloo's recorder does not name who is in group 2, and records no receive at all: nobody is accused.
    "chain": ("stuck_together", "2:tensor", 1, ()),
    "recv": ("healthy", "", None, ()),
}


@pytest.mark.parametrize("form", ["fr_rank_*", "fr_json_*"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_real_processes_recorded_is_read_rightly_in_both_forms(scenario: str, form: str) -> None:
    verdict = analyse_flight_recorder(sorted((RECORDED / scenario).glob(form)))
    assert (verdict.kind, verdict.group, verdict.seq, verdict.suspects) == ANSWERS[scenario]
    assert verdict.ranks == (0, 1, 2, 3)
    assert not verdict.problems


def test_a_group_whose_members_are_not_recorded_is_not_called_complete() -> None:
    verdict = ours(recorded("chain"))
    assert verdict.confidence == "low"
    assert "does not name its members" in verdict.reason


def test_where_the_members_are_recorded_the_chain_ends_at_the_rank_that_never_came() -> None:
    verdict = ours(as_nccl(recorded("chain")))
    assert (verdict.kind, verdict.group, verdict.suspects) == ("missing_ranks", "2:tensor", (2,))
    assert [(f.group, f.suspects, f.is_fallout) for f in verdict.findings] == [
        ("2:tensor", (2,), False),
        ("1:pipeline", (1,), True),
    ]
    assert "record_flight_recorder.py" in verdict.findings[0].where


# ------------------------------------------------------------------------------------------------ PyTorch's own


def theirs(dumps: Dumps) -> dict[str, tuple[int, str, frozenset[int]]]:
    """The first thing that PyTorch's analyser says of each group: sequence number, what, which ranks."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    logging.getLogger("Flight Recorder").setLevel(logging.CRITICAL)
    details = {f"fr_rank_{rank}": dump | {"rank": rank} for rank, dump in pickle.loads(pickle.dumps(dumps)).items()}
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=1000
    )
    version = next(iter(dumps.values()))["version"]
    answers: dict[str, tuple[int, str, frozenset[int]]] = {}
    for said in builder.build_db(details, options, version).collectives:
        if said.missing_ranks:
            answer = (said.collective_seq_id, "missing_ranks", frozenset(said.missing_ranks))
        elif not said.pass_check:
            what = {row.type_of_mismatch.state.name for row in said.mismatch_collectives.values()}
            answer = (said.collective_seq_id, "/".join(sorted(what)), frozenset(said.mismatch_collectives))
        else:
            continue
        answers.setdefault(said.pg_desc, answer)
    return answers


THEIR_WORDS = {
    "op": "COLLECTIVE_TYPE_MISMATCH",
    "sizes": "SIZE_OR_SYNTAX_MISMATCH",
    "dtypes": "COLLECTIVE_DTYPE_MISMATCH",
}


def in_their_words(verdict: FlightRecorderVerdict) -> dict[str, tuple[int, str, frozenset[int]]]:
    return {
        found.group: (found.seq, THEIR_WORDS.get(found.mismatch, found.kind), frozenset(found.suspects))
        for found in verdict.findings
        if found.kind in {"missing_ranks", "mismatch"}
    }


# recv: no entry at all.
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_recorded_dumps_we_and_pytorch_say_the_same(scenario: str) -> None:
    dumps = as_nccl(recorded(scenario))
    said = in_their_words(ours(dumps))
    assert said == theirs(dumps)
    assert bool(said) == (scenario not in {"healthy", "recv"})


def test_pytorch_s_analyser_cannot_read_gloo_s_dumps_and_ours_can() -> None:
    with pytest.raises(KeyError):
        theirs(recorded("behind"))
    assert ours(recorded("behind")).suspects == (2,)


OPS = ["all_reduce", "broadcast", "reduce", "barrier"]


@st.composite
def runs(draw: Any) -> tuple[int, dict[tuple[str, str], tuple[int, ...]], list[Step], Fault | None]:
    world = draw(st.integers(2, 6))
    groups = {DEFAULT: tuple(range(world))}
    for number in range(1, draw(st.integers(1, 4))):
        ranks = draw(st.sets(st.integers(0, world - 1), min_size=2, max_size=world))
        groups[(str(number), f"group{number}")] = tuple(sorted(ranks))
    calls = st.builds(
        Asked, st.sampled_from(OPS), st.sampled_from([(4,), (8,), (2, 3)]), st.sampled_from(["Float", "Int"])
    )
    program = draw(st.lists(st.tuples(st.sampled_from(sorted(groups)), calls), min_size=1, max_size=10))
    at = draw(st.integers(0, len(program) - 1))
    group, asked = program[at]
    # Not the first of the group, and not one of two: PyTorch's takes the first for right, and so does a tie of ours.
    rank = draw(st.sampled_from(groups[group][1:]))
    other = draw(st.one_of(st.none(), calls.filter(lambda call: call != asked)))
    return world, groups, program, draw(st.sampled_from([Fault(rank, at, other), Fault(rank, at, None), None]))


@given(runs())
@settings(max_examples=150, deadline=None)
def test_of_any_run_we_find_the_rank_that_did_it_and_say_of_each_group_what_pytorch_says(
    run: tuple[int, dict[tuple[str, str], tuple[int, ...]], list[Step], Fault | None],
) -> None:
    world, groups, program, fault = run
    dumps = play(groups, program, fault, world)
    verdict = ours(dumps)
    assert in_their_words(verdict) == theirs(dumps)
    if fault is None:
        assert verdict.kind == "healthy"
        return
    assert verdict.suspects == (fault.rank,)
    assert verdict.kind == ("missing_ranks" if fault.asks is None else "mismatch")
    (name, description), _ = program[fault.at]
    assert verdict.group == f"{name}:{description}"
    assert verdict.seq == sum(step[0] == (name, description) for step in program[: fault.at + 1])


def all_to_all(*sizes: tuple[int, int]) -> Dumps:
    dumps = play({DEFAULT: (0, 1, 2)}, [(DEFAULT, Asked("all_to_all"))], None, 3)
    for dump, (sent, received) in zip(dumps.values(), sizes, strict=True):
        dump["entries"][0] |= {"input_sizes": [[sent]], "output_sizes": [[received]]}
    return dumps


def test_an_exchange_of_unequal_parts_is_a_mismatch_only_where_the_sums_differ() -> None:
    fits, fails = all_to_all((4, 6), (8, 2), (3, 7)), all_to_all((4, 6), (8, 2), (3, 5))
    assert (ours(fits).kind, theirs(fits)) == ("healthy", {})
    verdict = ours(fails)
    # Nobody can say whose part is wrong; PyTorch names the first rank.
    assert (verdict.kind, verdict.seq, verdict.suspects) == ("mismatch", 1, ())
    assert theirs(fails) == {"0:default_pg": (1, "SIZE_OR_SYNTAX_MISMATCH", frozenset({0}))}


# ------------------------------------------------------------------------------------------------ where PyTorch's is wrong

THREE_CALLS: list[Step] = [(DEFAULT, Asked())] * 3


def test_the_odd_one_out_is_the_minority_even_where_it_is_the_lowest_rank() -> None:
    dumps = play(GROUPS, THREE_CALLS, Fault(0, 2, Asked("all_gather")), 4)
    assert ours(dumps).suspects == (0,)
    assert theirs(dumps)["0:default_pg"][2] == {1, 2, 3}


def test_a_rank_without_a_dump_is_the_suspect_where_the_others_agree_and_wait() -> None:
    dumps = play(GROUPS, THREE_CALLS, Fault(3, 2), 4)
    del dumps[3]
    verdict = ours(dumps)
    assert (verdict.kind, verdict.suspects, verdict.no_dump) == ("no_dump", (3,), (3,))
    with pytest.raises(AssertionError, match="Missing dump files"):
        theirs(dumps)


def test_a_difference_among_the_dumps_that_are_there_outweighs_the_missing_dump() -> None:
    dumps = play(GROUPS, THREE_CALLS, Fault(2, 2), 4)
    del dumps[3]
    verdict = ours(dumps)
    assert (verdict.kind, verdict.suspects, verdict.no_dump) == ("missing_ranks", (2,), (3,))


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_a_ring_buffer_that_lost_calls_of_one_group_accuses_nobody_of_it(most: int) -> None:
    # Ranks 0 and 1 are in two groups and have recorded twice as much, so that they have lost twice as much.
    program = [((name, Asked())) for _ in range(12) for name in (DEFAULT, ("1", "pipeline"))]
    dumps = play(GROUPS, program, None, 4)
    assert ours(overflowed(dumps, most)).kind == "healthy"
    hung = play(GROUPS, program, Fault(3, 22), 4)
    verdict = ours(overflowed(hung, most))
    assert (verdict.kind, verdict.group, verdict.seq, verdict.suspects) == ("missing_ranks", "0:default_pg", 12, (3,))


def test_pytorch_aligns_by_record_and_accuses_ranks_that_are_in_fewer_groups() -> None:
    program = [((name, Asked())) for _ in range(12) for name in (DEFAULT, ("1", "pipeline"))]
    dumps = overflowed(play(GROUPS, program, None, 4), 5)
    assert theirs(dumps) != {}
    assert ours(dumps).kind == "healthy"


# ------------------------------------------------------------------------------------------------ what a GPU adds


def changed(dumps: Dumps, rank: int, **fields: object) -> Dumps:
    dumps[rank]["entries"][-1] |= fields
    return dumps


def stuck() -> Dumps:
    """Four ranks inside the same third call."""
    dumps = play(GROUPS, THREE_CALLS, None, 4)
    for rank, dump in dumps.items():
        changed(dumps, rank, state="started", retired=False)
        dump["pg_status"]["0"]["last_completed_collective"] = 2
    return dumps


def test_all_inside_the_same_call_is_the_network_and_accuses_no_rank() -> None:
    verdict = ours(stuck())
    assert (verdict.kind, verdict.seq, verdict.suspects) == ("stuck_together", 3, ())


def test_a_rank_whose_gpu_never_started_what_it_enqueued_is_named() -> None:
    dumps = changed(stuck(), 2, state="scheduled")
    dumps[2]["pg_status"]["0"]["last_started_collective"] = 2
    assert (ours(dumps).kind, ours(dumps).suspects) == ("not_started", (2,))


def test_what_the_watchdog_gave_up_on_is_not_done() -> None:
    dumps = stuck()
    for rank in dumps:
        changed(dumps, rank, retired=True)
    assert ours(dumps).kind == "stuck_together"


def test_a_group_further_back_in_time_comes_first_where_both_stand_alone() -> None:
    late = ("3", "data")
    dumps = play(GROUPS, [(("1", "pipeline"), Asked()), (late, Asked())], Fault(3, 1), 4)
    other = play(GROUPS, [(("1", "pipeline"), Asked()), (late, Asked())], Fault(1, 0), 4)
    dumps[0], dumps[1] = other[0], other[1]
    verdict = ours(dumps)
    assert [(f.group, f.suspects) for f in verdict.findings] == [("1:pipeline", (1,)), ("3:data", (3,))]
    assert verdict.suspects == (1, 3)


def point_to_point(*calls: tuple[int, str, int, int, bool]) -> Dumps:
    dumps = play(GROUPS, [(DEFAULT, Asked())], None, 4)
    for rank, kind, peer, size, done in calls:
        entries = dumps[rank]["entries"]
        entries.append(send_or_receive(rank, kind, peer, size, done, seq=len(entries)) | {"record_id": len(entries)})
    return dumps


def test_a_receive_whose_sender_never_sends_names_the_sender() -> None:
    dumps = point_to_point(
        (0, "send", 1, 4, True), (1, "recv", 0, 4, True), (1, "recv", 0, 4, False), (0, "send", 2, 4, True)
    )
    verdict = ours(dumps)
    assert (verdict.kind, verdict.suspects) == ("p2p", (0,))
    assert "never called its side" in verdict.reason


def test_a_send_and_a_receive_of_different_sizes_name_both() -> None:
    verdict = ours(point_to_point((0, "send", 1, 4, False), (1, "recv", 0, 8, False)))
    assert (verdict.kind, verdict.suspects, verdict.findings[0].mismatch) == ("p2p", (0, 1), "sizes")


def test_a_send_and_a_receive_that_fit_are_the_network_s() -> None:
    assert ours(point_to_point((0, "send", 1, 4, False), (1, "recv", 0, 4, False))).suspects == ()


def test_the_parts_of_a_coalesced_call_are_compared_as_one() -> None:
    dumps = play(GROUPS, THREE_CALLS, None, 4)
    for rank, dump in dumps.items():
        last = dump["entries"][-1]
        parts = 3 if rank != 1 else 2
        more = [
            last | {"record_id": last["record_id"] + 1 + n, "state": "started", "retired": False} for n in range(parts)
        ]
        dump["entries"] += more
    verdict = ours(dumps)
    assert (verdict.kind, verdict.suspects) == ("mismatch", (1,))


# ------------------------------------------------------------------------------------------------ older forms


@pytest.mark.parametrize("bare", [True, False])
def test_the_form_of_torch_2_2_is_read(bare: bool) -> None:
    program: list[Step] = [(DEFAULT, Asked()), (("1", "pipeline"), Asked("broadcast", (9,))), (DEFAULT, Asked())]
    dumps = play({DEFAULT: GROUPS[DEFAULT], ("1", "pipeline"): (0, 1)}, program, Fault(2, 2), 4)
    # Rank 2 has recorded one call of the default group, the others two; without types and names of groups.
    verdict = ours(of_first_release(dumps, bare=bare))
    assert (verdict.kind, verdict.seq, verdict.suspects) == ("missing_ranks", 2, (2,))
    assert verdict.versions == ("1" if bare else "1.1",)


def test_in_the_form_of_torch_2_2_calls_of_two_groups_are_not_taken_for_one() -> None:
    dumps = play({DEFAULT: (0, 1), ("1", "x"): (0, 1)}, [(DEFAULT, Asked()), (("1", "x"), Asked("broadcast"))], None, 2)
    assert ours(of_first_release(dumps, bare=False)).kind == "healthy"


# ------------------------------------------------------------------------------------------------ files


def test_one_unreadable_dump_is_told_and_the_others_are_judged(tmp_path: Path) -> None:
    write(play(GROUPS, THREE_CALLS, Fault(2, 2), 4), tmp_path)
    whole = (tmp_path / "fr_rank_3").read_bytes()
    (tmp_path / "fr_rank_3").write_bytes(whole[: len(whole) // 2])
    verdict = analyse_flight_recorder([tmp_path])
    assert (verdict.kind, verdict.suspects, verdict.no_dump) == ("missing_ranks", (2,), (3,))
    assert len(verdict.problems) == 1
    assert "fr_rank_3" in verdict.problems[0]
    assert "cut short" in verdict.problems[0]


def test_a_dump_that_would_run_a_program_is_refused_by_name_and_runs_nothing(tmp_path: Path) -> None:
    class Crafted:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return Path.write_text, (tmp_path / "ran", "x")  # type: ignore[return-value]

    (tmp_path / "fr_rank_0").write_bytes(pickle.dumps({"version": "2.10", "entries": [Crafted()]}, 2))
    with pytest.raises(DumpError, match=r"fr_rank_0.*refused.*names a class, a function") as refused:
        analyse_flight_recorder([tmp_path])
    assert refused.value.hint
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_dumps_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DumpError, match="no file whose name ends in a rank") as error:
        analyse_flight_recorder([tmp_path])
    assert "TORCH_FR_DUMP_TEMP_FILE" in error.value.hint


def test_the_trigger_fifo_beside_the_dumps_is_not_opened(tmp_path: Path) -> None:
    write(play(GROUPS, THREE_CALLS, None, 4), tmp_path)
    os.mkfifo(tmp_path / "fr_rank_7")
    assert analyse_flight_recorder([tmp_path]).ranks == (0, 1, 2, 3)
    with pytest.raises(DumpError, match="not a regular file"):
        analyse_flight_recorder([tmp_path / "fr_rank_7"])


def test_damage_anywhere_in_a_dump_gives_a_verdict_or_our_own_error() -> None:
    chance = random.Random(5)
    whole = {rank: pickle.dumps(dump, 2) for rank, dump in as_nccl(recorded("chain")).items()}
    for _ in range(300):
        damaged = {rank: bytearray(data) for rank, data in whole.items()}
        target = damaged[chance.randrange(4)]
        for _ in range(chance.randint(1, 4)):
            target[chance.randrange(len(target))] = chance.randrange(256)
        try:
            analyse_dumps([parse_dump(bytes(data), rank) for rank, data in damaged.items()])
        except DumpError:
            continue
