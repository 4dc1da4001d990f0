"""The order of things around a hang: on record, looked at for a limited time, then ended, whatever came of the look."""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from krea_runner.model import ActionStage, DecisionKind, EvidenceSpec, JobState, Policy
from krea_runner.proc import Completed
from krea_runner.schedulers import NodeRecord
from krea_runner.supervise.collect import begin_collections
from krea_runner.supervise.tick import tick

from .test_collected import LOADS, WAITS, of_node
from .test_tick import RUNNING, Desk, desk, ended  # noqa: F401 - desk is a fixture


class Nodes:
    """What the nodes print when they are asked, or a wait that does not end."""

    def __init__(self, desk: Desk) -> None:
        self.printed = "\n".join(
            [*of_node("n1", range(2)), *of_node("n2", range(2, 3)), *of_node("n2", range(3, 4), LOADS)]
        )
        self.asked: list[tuple[str, tuple[str, ...], str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.cleaned = 0
        self.before_answer = lambda: None
        desk.says.run_beside = self.run_beside
        desk.says.end_beside = self.end_beside

    def run_beside(
        self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float, user: str = ""
    ) -> Completed:
        self.asked.append((job_id, tuple(nodes), user))
        self.gate.wait(30)
        self.before_answer()
        return Completed(tuple(argv), 0, self.printed, "")

    def end_beside(self, job_id: str) -> None:
        self.cleaned += 1


def hang(desk: Desk) -> None:
    """Ranks that step, and then all stand still; a tick short of the verdict."""
    desk.beat(5, flush=1)
    desk.tick(RUNNING)
    desk.beat(6, flush=2)
    desk.tick()


def until_incident(desk: Desk) -> str:
    for _ in range(200):
        text = desk.tick().lines[0].text
        if desk.history.incidents(run_id=desk.run_id):
            return text
    raise AssertionError(text)


def evidence(desk: Desk) -> list[str]:
    (incident,) = desk.history.incidents(run_id=desk.run_id)
    return [line for line in incident.finding.evidence if not line.startswith("rank ")]


@pytest.fixture
def nodes(desk: Desk) -> Nodes:
    hang(desk)
    return Nodes(desk)


def test_a_hung_gang_is_looked_at_before_it_is_requeued(desk: Desk, nodes: Nodes) -> None:
    nodes.before_answer = lambda: desk.says.asked.append("looked")
    until_incident(desk)
    assert desk.says.asked == ["looked", "requeue", "start_now"]
    assert nodes.asked == [("7", ("n1", "n2"), "alice")]
    lines = evidence(desk)
    assert lines[0].startswith("collected in ")
    assert lines[0].endswith(" s from 2 of 2 nodes")
    assert (
        lines[1] == "stacks: 3 of 4 ranks wait in all_reduce (train.py:120); rank 3 in DataLoader.next (loader.py:44)"
    )
    folder = desk.run_dir.incident(desk.history.incidents(run_id=desk.run_id)[0].attempt)
    assert "rank 3 in DataLoader.next (loader.py:44):\n" in (folder / "stacks.txt").read_text()
    assert '"n2"' in (folder / "evidence.json").read_text()


def test_what_never_answers_puts_off_the_requeue_by_the_cap_and_no_more(desk: Desk, nodes: Nodes) -> None:
    nodes.gate.clear()
    requeue, sent_at = desk.says.requeue, []
    desk.says.requeue = lambda job_id: (sent_at.append(desk.clock.wall()), requeue(job_id))
    began = desk.clock.mono()
    until_incident(desk)
    try:
        assert desk.says.asked == ["requeue", "start_now"]
        (incident,) = desk.history.incidents(run_id=desk.run_id)
        waited = desk.clock.wall() - incident.noticed_at
        assert 20 <= waited < 20 + 10, (waited, began)
        assert 20 <= sent_at[0] - incident.noticed_at < 20 + 10
        assert evidence(desk)[0].endswith(" s (no answer in 20 s)")
    finally:
        nodes.gate.set()


@pytest.mark.parametrize(
    "fault", [OSError(2, "No such file or directory", "srun"), RuntimeError("a bug"), ValueError()]
)
def test_no_fault_of_the_look_keeps_a_run_from_its_restart(desk: Desk, nodes: Nodes, fault: Exception) -> None:
    def fail() -> None:
        raise fault

    nodes.before_answer = fail
    until_incident(desk)
    assert desk.says.asked == ["requeue", "start_now"]
    assert evidence(desk)[0].startswith("collected nothing in ")
    assert ("srun: No such file" in evidence(desk)[0]) == isinstance(fault, OSError)


def test_a_run_directory_that_cannot_be_written_keeps_nothing_from_its_restart(desk: Desk, nodes: Nodes) -> None:
    (desk.run_dir.root / "incidents").write_text("in the way")
    until_incident(desk)
    assert desk.says.asked == ["requeue", "start_now"]
    assert evidence(desk)[1].startswith("stacks: 3 of 4 ranks wait")
    assert "evidence.json could not be written" in evidence(desk)


def test_a_supervisor_that_was_killed_over_the_look_is_followed_by_one_that_looks(
    desk: Desk,
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("krea_runner.supervise.tick.begin_collections", _killed)
        with pytest.raises(KeyboardInterrupt):
            until_incident(desk)
    assert desk.history.open_action(desk.run_id).stage is ActionStage.INTENDED
    desk.tick()
    assert len(nodes.asked) == 1
    assert evidence(desk)[1].startswith("stacks: 3 of 4 ranks wait")
    assert desk.says.asked == ["requeue", "start_now"]


def test_one_that_comes_too_late_after_it_does_not_look_but_acts(
    desk: Desk,
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("krea_runner.supervise.tick.begin_collections", _killed)
        with pytest.raises(KeyboardInterrupt):
            until_incident(desk)
    desk.clock.sleep(300)
    desk.tick()
    assert (nodes.asked, desk.says.asked) == ([], ["requeue", "start_now"])


def _killed(*words: Any) -> Any:
    if words[-1]:  # an action is on record
        raise KeyboardInterrupt
    return begin_collections(*words)


def change(desk: Desk, **values: object) -> None:
    run = desk.history.run(desk.run_id)
    import sqlalchemy as sa

    from krea_runner.config import config_to_json
    from krea_runner.history.schema import runs

    with desk.history.database.write() as connection:
        config = config_to_json(dataclasses.replace(run.config, **values))
        connection.execute(sa.update(runs).where(runs.c.run_id == desk.run_id).values(config=config))


def test_a_run_that_is_only_observed_is_looked_at_once(desk: Desk, nodes: Nodes) -> None:
    change(desk, policy=Policy(mode="observe"))
    until_incident(desk)
    assert evidence(desk)[1].startswith("stacks: 3 of 4 ranks wait")
    for _ in range(3):
        desk.tick()
    (incident,) = desk.history.incidents(run_id=desk.run_id)
    assert (len(nodes.asked), desk.says.asked, incident.decision.kind) == (1, [], DecisionKind.WAIT)


def test_with_collect_false_nobody_is_asked(desk: Desk, nodes: Nodes) -> None:
    change(desk, evidence=EvidenceSpec(collect=False))
    until_incident(desk)
    assert (nodes.asked, desk.says.asked) == ([], ["requeue", "start_now"])


def test_of_a_job_that_is_over_nothing_is_asked(desk: Desk, nodes: Nodes) -> None:
    desk.tick(ended(JobState.FAILED, exit_code=1))
    assert len(desk.history.incidents(run_id=desk.run_id)) == 1
    assert (nodes.asked, desk.says.asked[0]) == ([], "requeue")


def test_a_dry_run_asks_nobody(desk: Desk, nodes: Nodes) -> None:
    supervisor = dataclasses.replace(desk.supervisor(), dry_run=True)
    desk.clock.sleep(10_000)
    tick(supervisor)
    assert nodes.asked == []


def test_a_node_that_slurm_gets_no_answer_from_is_left_out_and_named(desk: Desk, nodes: Nodes) -> None:
    desk.says.node_records = [NodeRecord("n1", "ALLOCATED+DRAIN"), NodeRecord("n2", "ALLOCATED*+NOT_RESPONDING")]
    nodes.printed = "\n".join(of_node("n1", range(2)))
    until_incident(desk)
    assert nodes.asked == [("7", ("n1",), "alice")]
    assert evidence(desk)[0].endswith("from 1 of 2 nodes; n2 not asked, Slurm says it is out")


def test_the_local_scheduler_is_asked_without_nodes_and_for_pages_below_the_run(
    desk: Desk,
    nodes: Nodes,
    tmp_path: Path,
) -> None:
    change(desk, scheduler="local")
    until_incident(desk)
    assert nodes.asked == [("7", (), "alice")]
    assert " s from " not in evidence(desk)[0]
    assert WAITS[2][1] in (desk.run_dir.incident(desk.history.incidents()[0].attempt) / "stacks.txt").read_text()
