"""Which nodes a requeued job is kept off."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from krea_runner.history.exclusions import add_exclusions, end_exclusions, list_exclusions
from krea_runner.history.store import open_history
from krea_runner.schedulers import NodeRecord, Placement
from krea_runner.schedulers.slurm_nodes import parse_nodes, parse_placements
from krea_runner.supervise.exclude import choose, users_own

from .conftest import make_config

NODES = {name: NodeRecord(name, "IDLE", ("train",)) for name in ("n1", "n2", "n3", "n4")}
TRAIN = Placement(("train",))


@pytest.mark.parametrize(
    ("gang", "own", "wanted", "chosen"),
    [
        (2, [], ["n1"], ["n1"]),
        (2, [], ["n1", "n2", "n3"], ["n1", "n2"]),
        (2, ["n4"], ["n1", "n2"], ["n1"]),
        (4, [], ["n1"], []),
        (2, ["n1"], ["n1", "no-such-node"], []),
    ],
)
def test_the_gang_always_keeps_enough_nodes(gang: int, own: list[str], wanted: list[str], chosen: list[str]) -> None:
    assert choose(NODES, TRAIN, own, wanted, gang) == chosen


def test_nodes_that_are_out_or_elsewhere_do_not_count_as_left() -> None:
    nodes = NODES | {"n4": NodeRecord("n4", "DOWN*", ("train",)), "m1": NodeRecord("m1", "IDLE", ("other",))}
    assert choose(nodes, TRAIN, [], ["n1", "n2", "n4"], 2) == ["n1", "n4"]


def test_a_node_that_the_job_cannot_do_without_is_not_excluded() -> None:
    assert choose(NODES, Placement(("train",), required=("n1", "n2")), [], ["n1", "n3"], 2) == ["n3"]


def test_nodes_without_the_jobs_features_or_outside_its_reservation_do_not_count_as_left() -> None:
    h100 = {name: replace(node, features=("h100", "ib")) for name, node in NODES.items() if name != "n4"}
    assert choose(NODES | h100, Placement(features=frozenset({"h100"})), [], ["n1", "n2"], 2) == ["n1"]
    named = replace(NODES["n4"], reservation="big")
    for n4 in (named, NodeRecord("n4", "IDLE+RESERVED", ("train",)), NodeRecord("n4", "IDLE+MAINTENANCE", ("train",))):
        assert choose(NODES | {"n4": n4}, TRAIN, [], ["n1", "n2"], 2) == ["n1"]
    held = NODES | {"n4": named}
    assert choose(held, TRAIN, [], ["n1", "n2"], 2) == ["n1"]
    assert choose(held, replace(TRAIN, reservation="big"), [], ["n4", "n1"], 1) == ["n1"]


@pytest.mark.parametrize(
    ("said", "features"),
    [("(null)", set()), ("a", {"a"}), ("a&b,c", {"a", "b", "c"}), ("[a|b]&c", set()), ("a*2&b", set())],
)
def test_only_a_plain_list_of_features_is_judged(said: str, features: set[str]) -> None:
    text = f"7+0\x1ftrain,lo\x1fn[1-2]\x1fn3\x1fbig\x1f{said}\x1e\n7+1\x1fa\x1f\x1f\x1f\x1f\x1e\n8\x1fb\x1f\x1f\x1f\x1f\x1e\n"
    found = parse_placements(text)
    assert found["7"] == Placement(("train", "lo"), ("n1", "n2"), ("n3",), "big", frozenset(features))
    assert (list(found), found["8"]) == (["7", "8"], Placement(("b",)))


@pytest.mark.parametrize(
    ("state", "is_out"),
    [
        ("IDLE", False), ("MIXED", False), ("IDLE+RESERVED", False), ("IDLE*", True), ("MIXED+DRAIN", True),
        ("DOWN*+DRAIN+NOT_RESPONDING", True), ("IDLE+COMPLETING", False),
    ],
)  # fmt: skip
def test_compound_states(state: str, is_out: bool) -> None:
    assert NodeRecord("n1", state).is_out is is_out


def test_what_the_user_excludes_is_read_in_every_form(tmp_path: Path) -> None:
    options = MappingProxyType({"exclude": "n[1-2]", "extra": ["--exclude=n3", "-x n4", "--mem=0"]})
    assert users_own(replace(make_config(tmp_path), slurm=options)) == ["n1", "n2", "n3", "n4"]


def test_an_exclusion_ends_when_it_expires_or_is_taken_back_and_stays_on_record(tmp_path: Path) -> None:
    history = open_history(tmp_path / "state")
    run_id = history.create_run(make_config(tmp_path), user="alice", tag="t", now=1.0).run_id
    shared = {"user": "alice", "reason": "why", "who": "h", "now": 1.0}
    add_exclusions(history, ["n1"], run_id=run_id, expires_at=10.0, **shared)
    add_exclusions(history, ["n2"], run_id=None, expires_at=None, **shared)
    known = list_exclusions(history, user="alice", run_id=run_id)
    assert [(one.node, one.is_active(9.0), one.is_active(10.0)) for one in known] == [
        ("n2", True, True),
        ("n1", True, False),
    ]
    assert [one.node for one in list_exclusions(history, user="alice", run_id=99)] == ["n2"]
    assert end_exclusions(history, ["n1", "n2"], user="bob", run_id=None, now=5.0) == 0
    assert end_exclusions(history, ["n1", "n2"], user="alice", run_id=None, now=5.0) == 2
    assert [one.is_active(6.0) for one in list_exclusions(history, user="alice")] == [False, False]


def test_a_reasons_further_lines_are_no_keys_of_the_node() -> None:
    text = (
        "NodeName=n1 Arch=x86_64 \n   State=IDLE+DRAIN ThreadsPerCore=1\n   Partitions=train,debug \n"
        "   Reason=two [root@1796222348]\n             State=DOWN\n\nNodeName=n2 \n   State=IDLE ThreadsPerCore=1\n\n"
    )
    n1, n2 = parse_nodes(text).values()
    assert (n1.raw_state, n1.partitions, n1.reason, n1.reason_by) == (
        "IDLE+DRAIN",
        ("train", "debug"),
        "two\n   State=DOWN",
        "root",
    )
    assert (n2.reason, n2.reason_at) == ("", None)
