"""When what the logs say holds a restart: the table, cell by cell. Whatever is not sure changes nothing."""

import dataclasses
from itertools import product

import pytest

from krea_runner.decide.decision import Case, decide
from krea_runner.decide.verdicts import HOLDS, Hold
from krea_runner.diagnose.signatures import load_catalog
from krea_runner.model import AttemptKey, Decision, DecisionKind, Diagnosis, Finding, Incident, Policy, Symptom

CAUSES = load_catalog().causes
SURE = Diagnosis("user_exception", "stop_for_human", "an exception", "fix it", "high")


def case(diagnosis: Diagnosis | None, *, symptom: Symptom = Symptom.CRASH, step: int | None = 7, **changes) -> Case:
    finding = Finding(symptom, "rank_failed", "crash", step=step, diagnosis=diagnosis)
    base = Case(finding, Policy(), (), checkpoint_step=5, exit_codes=frozenset({1}), now=1000.0, requeue_allowed=True)
    return dataclasses.replace(base, **changes)


def before(diagnosis: Diagnosis | None, *, step: int | None = 7, saved: int | None = 5) -> Incident:
    finding = Finding(Symptom.CRASH, "rank_failed", "crash", step=step, diagnosis=diagnosis)
    decision = Decision(DecisionKind.REQUEUE, "")
    return Incident(1, 1, "llm", AttemptKey("7"), finding, 900.0, saved, decision)


def of(cause: str, **changes) -> Diagnosis:
    return dataclasses.replace(SURE, cause=cause, policy=CAUSES[cause].policy, **changes)


@pytest.mark.parametrize(
    ("cause", "confidence", "everywhere"), list(product(sorted(CAUSES), ["high", "medium", "low"], [True, False]))
)
def test_a_first_crash_is_held_only_where_the_table_says_so(cause: str, confidence: str, everywhere: bool) -> None:
    hold = HOLDS.get(cause)
    wanted = (
        confidence == "high"
        and CAUSES[cause].policy == "stop_for_human"
        and (hold is Hold.AT_ONCE or (hold is Hold.EVERYWHERE and everywhere))
    )
    decision = decide(case(of(cause, confidence=confidence, everywhere=everywhere)))
    assert decision.kind is (DecisionKind.HOLD if wanted else DecisionKind.REQUEUE)
    if not wanted:
        assert decision == decide(case(None))


def test_the_table_names_each_cause_that_a_person_must_mend() -> None:
    assert set(HOLDS) == {name for name, cause in CAUSES.items() if cause.policy == "stop_for_human"}


def test_a_sites_own_cause_is_taken_at_its_word() -> None:
    own = dataclasses.replace(SURE, cause="licence_lost")
    assert decide(case(own)).kind is DecisionKind.HOLD
    assert decide(case(dataclasses.replace(own, policy="restart"))).kind is DecisionKind.REQUEUE


@pytest.mark.parametrize("symptom", [Symptom.HANG, Symptom.NODE_FAIL, Symptom.TIME_LIMIT, Symptom.PREEMPTED])
def test_only_a_crash_is_held_at_once(symptom: Symptom) -> None:
    assert decide(case(of("storage_full", everywhere=True), symptom=symptom)).kind is DecisionKind.REQUEUE


@pytest.mark.parametrize(
    ("earlier", "now", "held"),
    [
        (before(SURE), case(SURE), True),
        (before(SURE, step=3, saved=2), case(SURE), False),
        (before(SURE, step=3), case(SURE), True),  # no newer checkpoint
        (before(SURE, saved=2), case(SURE), True),  # the same step again
        (before(SURE, step=None, saved=None), case(SURE, step=None, checkpoint_step=None), False),
        (before(of("cuda_oom")), case(SURE), False),
        (before(dataclasses.replace(SURE, confidence="medium")), case(SURE), False),
        (before(SURE), case(dataclasses.replace(SURE, confidence="medium")), False),
        (before(None), case(SURE), False),
        (before(SURE), case(SURE, symptom=Symptom.HANG), True),
        (before(of("numeric_divergence")), case(of("numeric_divergence")), True),
    ],
)
def test_what_comes_back_before_anything_was_gained_is_held(earlier: Incident, now: Case, held: bool) -> None:
    decision = decide(dataclasses.replace(now, earlier=(earlier,)))
    assert decision.kind is (DecisionKind.HOLD if held else DecisionKind.REQUEUE)
    assert decision.reason.startswith("for the second time, an exception: fix it") is held


def test_a_person_who_let_it_go_on_gave_it_another_try() -> None:
    held = dataclasses.replace(before(SURE), decision=Decision(DecisionKind.HOLD, ""))
    assert decide(case(SURE, earlier=(held,))).kind is DecisionKind.REQUEUE


def test_what_slurm_has_already_requeued_is_not_held() -> None:
    assert decide(case(of("storage_full"), back_in_queue=True)).kind is DecisionKind.WAIT


def test_failures_that_are_surely_two_are_not_counted_as_one() -> None:
    ecc, full = of("gpu_ecc"), of("gpu_nvlink")
    twice = (before(full), before(full))
    assert decide(case(ecc, earlier=twice)).kind is DecisionKind.REQUEUE
    same = decide(case(full, earlier=twice))
    assert (same.kind, same.reason.startswith("the same crash (gpu_nvlink) 3 times")) == (DecisionKind.HOLD, True)
    unsure = dataclasses.replace(ecc, confidence="low")
    assert decide(case(unsure, earlier=twice)).kind is DecisionKind.HOLD
