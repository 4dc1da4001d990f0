import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.decide.decision import Case, decide
from krea_runner.model import AttemptKey, Decision, DecisionKind, Finding, Incident, Policy, Symptom

NOW = 1_800_000_000.0
K = DecisionKind


def finding(symptom: Symptom = Symptom.CRASH, cause: str = "rank_killed") -> Finding:
    return Finding(symptom=symptom, cause=cause, summary="")


def incident(
    number: int,
    *,
    ago_s: float = 60.0,
    checkpoint: int | None = 50,
    kind: DecisionKind = K.REQUEUE,
    **what: Any,
) -> Incident:
    return Incident(
        incident_id=number, run_id=1, run_name="llm", attempt=AttemptKey("7", number), finding=finding(**what),
        noticed_at=NOW - ago_s, checkpoint_step=checkpoint, decision=Decision(kind, ""),
    )  # fmt: skip


def case(**changes: Any) -> Case:
    base = Case(
        finding=finding(),
        policy=Policy(max_restarts=3),
        earlier=(),
        checkpoint_step=100,
        exit_codes=frozenset({137}),
        now=NOW,
    )
    return dataclasses.replace(base, **changes)


TABLE = [
    # what happened, decision, a word of the reason
    ("a crash", {}, K.REQUEUE, "from step 100"),
    ("a crash before any checkpoint", {"checkpoint_step": None}, K.REQUEUE, "from the start"),
    ("checkpoints not seen", {"checkpoint_step": None, "checkpoints_unseen": True}, K.REQUEUE, "could not see"),
    ("a hang", {"finding": finding(Symptom.HANG, "rank_stopped")}, K.REQUEUE, "restart 1 of 3"),
    ("a node failure", {"finding": finding(Symptom.NODE_FAIL, "node_fail")}, K.REQUEUE, "restart 1 of 3"),
    ("a time limit", {"finding": finding(Symptom.TIME_LIMIT, "time_limit")}, K.REQUEUE, "not charged"),
    ("a preemption", {"finding": finding(Symptom.PREEMPTED, "preempted")}, K.REQUEUE, "not charged"),
    ("a person's scancel", {"finding": finding(Symptom.CANCELLED, "cancelled")}, K.STOP, "scancel"),
    (
        "a requeue by somebody else",
        {"finding": finding(Symptom.REQUEUED_ELSEWHERE, "unknown")},
        K.WAIT,
        "already back",
    ),
    ("an exit code that means never", {"exit_codes": frozenset({143, 93})}, K.HOLD, "exit code 93"),
    (
        "93, which means never beside the user's own list",
        {"exit_codes": frozenset({93}), "policy": Policy(never_restart_exit_codes=(2,))},
        K.HOLD,
        "exit code 93",
    ),
    (
        "93, where the user says that it means always",
        {"exit_codes": frozenset({93}), "policy": Policy(always_restart_exit_codes=(93,))},
        K.REQUEUE,
        "",
    ),
    (
        "an exit code that means always, the third time at one checkpoint",
        {
            "exit_codes": frozenset({7}),
            "policy": Policy(max_restarts=3, always_restart_exit_codes=(7,)),
            "checkpoint_step": 50,
            "earlier": [incident(1), incident(2)],
        },
        K.REQUEUE,
        "restart 3 of 3",
    ),
    (
        "an exit code that means always, the budget spent",
        {
            "exit_codes": frozenset({7}),
            "policy": Policy(max_restarts=2, always_restart_exit_codes=(7,)),
            "checkpoint_step": 50,
            "earlier": [incident(1), incident(2)],
        },
        K.HOLD,
        "budget spent",
    ),
    ("a job that may not be requeued", {"requeue_allowed": False}, K.RESUBMIT, "as a new job"),
    (
        "a node failure that Slurm requeued",
        {"finding": finding(Symptom.NODE_FAIL, "node_fail"), "back_in_queue": True},
        K.WAIT,
        "by itself",
    ),
    (
        "a preemption that Slurm requeued",
        {"finding": finding(Symptom.PREEMPTED, "preempted"), "back_in_queue": True},
        K.WAIT,
        "by itself",
    ),
    (
        "a crash that somebody requeued",
        {"back_in_queue": True},
        K.WAIT,
        "already back",
    ),
    (
        "a requeuehold",
        {"finding": finding(Symptom.REQUEUED_ELSEWHERE), "back_in_queue": True, "held_by": "requeue"},
        K.WAIT,
        "scontrol release",
    ),
    (
        "a launch failure that Slurm holds",
        {"finding": finding(cause="launch_failed"), "back_in_queue": True, "held_by": "launch"},
        K.REQUEUE,
        "released",
    ),
    (
        "an expedited job that crashed",
        {"back_in_queue": True, "held_by": "crash"},
        K.REQUEUE,
        "released",
    ),
    (
        "the third launch failure, before any checkpoint",
        {
            "finding": finding(cause="launch_failed"),
            "checkpoint_step": None,
            "earlier": [
                incident(1, checkpoint=None, cause="launch_failed"),
                incident(2, checkpoint=None, cause="launch_failed"),
            ],
        },
        K.HOLD,
        "3 times without any checkpoint",
    ),
    ("a run in the wrong directory", {"finding": finding(cause="ran_in_tmp")}, K.HOLD, "make the directory"),
    ("a hidden failure", {"finding": finding(cause="hidden_failure")}, K.HOLD, "krea-runner stop"),
    ("a job gone from the queue", {"finding": finding(cause="vanished")}, K.HOLD, "cancel"),
    ("observe mode", {"policy": Policy(mode="observe")}, K.WAIT, "would REQUEUE"),
    (
        "a person's scancel in observe mode",
        {"finding": finding(Symptom.CANCELLED), "policy": Policy(mode="observe")},
        K.STOP,
        "",
    ),
    (
        "a spent budget",
        {"earlier": [incident(n, checkpoint=n) for n in range(3)]},
        K.HOLD,
        "budget spent: 3 of 3",
    ),
    (
        "a budget spent long ago",
        {"earlier": [incident(n, ago_s=1e6, checkpoint=n) for n in range(3)]},
        K.REQUEUE,
        "restart 1 of 3",
    ),
    (
        "time limits, however many",
        {
            "finding": finding(Symptom.TIME_LIMIT),
            "earlier": [incident(n, symptom=Symptom.TIME_LIMIT) for n in range(30)],
        },
        K.REQUEUE,
        "not charged",
    ),
    (
        "the second failure at one checkpoint",
        {"checkpoint_step": 50, "earlier": [incident(1)]},
        K.REQUEUE,
        "restart 2 of 3",
    ),
    (
        "the third failure alike at one checkpoint",
        {"checkpoint_step": 50, "earlier": [incident(1), incident(2)]},
        K.HOLD,
        "3 times without a checkpoint newer than step 50",
    ),
    (
        "the third failure, each of another kind",
        {"checkpoint_step": 50, "earlier": [incident(1, cause="oom"), incident(2, cause="rank_failed")]},
        K.REQUEUE,
        "restart 3 of 3",
    ),
    (
        "failures with a newer checkpoint each time",
        {"checkpoint_step": 50, "earlier": [incident(1, checkpoint=30), incident(2, checkpoint=40)]},
        K.REQUEUE,
        "",
    ),
    (
        "unknown progress",
        {"checkpoint_step": None, "earlier": [incident(1, checkpoint=None), incident(2, checkpoint=None)]},
        K.REQUEUE,
        "",
    ),
    (
        "a failure after a person resumed a held run",
        {"checkpoint_step": 50, "earlier": [incident(1), incident(2), incident(3, kind=K.HOLD)]},
        K.REQUEUE,
        "restart 1 of 3",
    ),
]


@pytest.mark.parametrize(("what", "changes", "kind", "word"), TABLE, ids=[row[0] for row in TABLE])
def test_decision_table(what: str, changes: dict[str, Any], kind: DecisionKind, word: str) -> None:
    decision = decide(case(**changes))
    assert decision.kind is kind
    assert word in decision.reason
    assert decision.reason


incidents = st.lists(
    st.builds(
        incident,
        st.integers(0, 99),
        ago_s=st.floats(0, 2e5),
        checkpoint=st.none() | st.integers(0, 100),
        kind=st.sampled_from(K),
        symptom=st.sampled_from(Symptom),
        cause=st.sampled_from(["a", "b"]),
    ),
    max_size=8,
)
cases = st.builds(
    Case,
    finding=st.builds(finding, st.sampled_from(Symptom), st.sampled_from(["a", "b"])),
    policy=st.builds(
        Policy,
        mode=st.sampled_from(["observe", "act"]),
        max_restarts=st.integers(0, 4),
        no_progress_limit=st.integers(1, 3),
    ),
    earlier=incidents,
    checkpoint_step=st.none() | st.integers(0, 100),
    exit_codes=st.frozensets(st.sampled_from([0, 1, 93, 137]), max_size=2),
    now=st.just(NOW),
    requeue_allowed=st.sampled_from([None, True, False]),
    back_in_queue=st.booleans(),
    held_by=st.sampled_from(["", "launch", "crash", "requeue"]),
)
RESTARTS = {K.REQUEUE, K.RESUBMIT}


@given(cases)
def test_a_cancel_is_final_and_nothing_is_restarted_beyond_the_policy(case: Case) -> None:
    decision = decide(case)
    if case.finding.symptom is Symptom.CANCELLED:
        assert decision.kind is K.STOP
    if case.policy.mode == "observe":
        assert decision.kind not in RESTARTS
    if case.requeue_allowed is False and not case.held_by:
        assert decision.kind is not K.REQUEUE
    if case.back_in_queue:  # never two live attempts: what is back in the queue is not submitted beside itself
        assert decision.kind is not K.RESUBMIT or case.held_by == ""
        assert decision.kind is not K.REQUEUE or case.held_by in {"launch", "crash"}
    if decision.kind in RESTARTS and case.finding.symptom in {Symptom.CRASH, Symptom.HANG, Symptom.NODE_FAIL}:
        assert case.policy.max_restarts > 0
    assert decision.kind in {K.WAIT, K.REQUEUE, K.RESUBMIT, K.HOLD, K.STOP}
