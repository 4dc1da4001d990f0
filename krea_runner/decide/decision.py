"""What to do about a failure. Pure: the finding, the run's own history and its policy in, one Decision out.

One question after the other; the first answer wins. The order is the policy: what a person wants, then what must
never be restarted, then what a restart would not help, then the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from krea_runner.model import Decision, DecisionKind, Finding, Incident, Policy, Symptom

# A restart after one of these is charged to the budget. A time limit or a preemption is not a crash (design rule 1).
CHARGED = frozenset({Symptom.HANG, Symptom.CRASH, Symptom.NODE_FAIL})


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a decision may depend on. `earlier` are this run's incidents, oldest first, without the one at hand."""

    finding: Finding
    policy: Policy
    earlier: Sequence[Incident]
    checkpoint_step: int | None
    exit_codes: frozenset[int]
    now: float
    requeue_allowed: bool | None = None


def decide(case: Case) -> Decision:
    for rule in _RULES:
        decision = rule(case)
        if decision is not None:
            return decision
    return _restart(case)


def _a_persons_cancel(case: Case) -> Decision | None:
    if case.finding.symptom is Symptom.CANCELLED:
        return Decision(DecisionKind.STOP, "cancelled from outside (scancel): left alone for good")
    return None


def _already_requeued(case: Case) -> Decision | None:
    if case.finding.symptom is Symptom.REQUEUED_ELSEWHERE:
        return Decision(DecisionKind.WAIT, "already back in the queue: waiting for its next start")
    return None


def _never_restart(case: Case) -> Decision | None:
    codes = sorted(case.exit_codes & set(case.policy.never_restart_exit_codes))
    if codes and case.finding.symptom is Symptom.CRASH:
        return Decision(DecisionKind.HOLD, f"exit code {codes[0]} means: do not restart")
    return None


def _requeue_forbidden(case: Case) -> Decision | None:
    if case.requeue_allowed is False:
        return Decision(DecisionKind.HOLD, "the job was submitted with --no-requeue")
    return None


def _no_progress(case: Case) -> Decision | None:
    if case.finding.symptom not in CHARGED or case.checkpoint_step is None:
        return None  # unknown progress never counts as none
    fruitless = 0
    for incident in reversed(_since_last_hold(case.earlier)):
        if not _same_failure(incident.finding, case.finding) or incident.checkpoint_step != case.checkpoint_step:
            break
        fruitless += 1
    if fruitless < case.policy.no_progress_limit:
        return None
    return Decision(
        DecisionKind.HOLD,
        f"the same {case.finding.symptom.value} ({case.finding.cause}) {fruitless + 1} times without a checkpoint newer than "
        f"step {case.checkpoint_step}",
    )


def _over_budget(case: Case) -> Decision | None:
    if case.finding.symptom not in CHARGED:
        return None
    spent = restarts_in_window(case.earlier, case.policy, case.now)
    if spent < case.policy.max_restarts:
        return None
    return Decision(
        DecisionKind.HOLD,
        f"budget spent: {spent} of {case.policy.max_restarts} restarts in {case.policy.window_s / 3600:g} h",
    )


def _observe_only(case: Case) -> Decision | None:
    if case.policy.mode != "observe":
        return None
    would = _restart(case)
    return Decision(DecisionKind.WAIT, f"observe mode: would {would.kind}: {would.reason}")


_RULES: tuple[Callable[[Case], Decision | None], ...] = (
    _a_persons_cancel,
    _already_requeued,
    _never_restart,
    _requeue_forbidden,
    _no_progress,
    _over_budget,
    _observe_only,
)


def _restart(case: Case) -> Decision:
    source = "from the start" if case.checkpoint_step is None else f"from step {case.checkpoint_step}"
    if case.finding.symptom not in CHARGED:
        return Decision(DecisionKind.REQUEUE, f"{source}; not a crash, budget not charged")
    spent = restarts_in_window(case.earlier, case.policy, case.now) + 1
    return Decision(DecisionKind.REQUEUE, f"{source}, same job; restart {spent} of {case.policy.max_restarts}")


def restarts_in_window(incidents: Sequence[Incident], policy: Policy, now: float) -> int:
    """How much of the budget is used: restarts that were charged, of one run, oldest first."""
    since = now - policy.window_s
    return sum(
        incident.decision.kind is DecisionKind.REQUEUE
        and incident.finding.symptom in CHARGED
        and incident.noticed_at >= since
        for incident in _since_last_hold(incidents)
    )


def _since_last_hold(earlier: Sequence[Incident]) -> Sequence[Incident]:
    """A person who let a held run go on gave it a new budget."""
    for index in range(len(earlier) - 1, -1, -1):
        if earlier[index].decision.kind is DecisionKind.HOLD:
            return earlier[index + 1 :]
    return earlier


def _same_failure(one: Finding, other: Finding) -> bool:
    return (one.symptom, one.cause) == (other.symptom, other.cause)
