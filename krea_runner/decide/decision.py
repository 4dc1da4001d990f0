"""What to do about a failure. Pure: the finding, the run's own history and its policy in, one Decision out.

One question after the other; the first answer wins. The order is the policy: what a person wants, then what must
never be restarted, then what a restart would not help, then the budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from krea_runner.decide.verdicts import speaks_against_restart
from krea_runner.model import Decision, DecisionKind, Finding, Incident, Policy, Symptom

# A restart after one of these is charged to the budget. A time limit or a preemption is not a crash (design rule 1).
CHARGED = frozenset({Symptom.HANG, Symptom.CRASH, Symptom.NODE_FAIL})
NEVER = 93  # of nvidia-resiliency-ext's launcher: a restart makes no sense
RESTARTS = frozenset({DecisionKind.REQUEUE, DecisionKind.RESUBMIT})

# Causes of which a restart would only make more of the same, and what a person should do.
_FOR_A_PERSON = {
    "ran_in_tmp": "make the directory, or mend --chdir; then: krea-runner resume RUN",
    "hidden_failure": "if it is done: krea-runner stop RUN; if not, mend the script's exit code, then: krea-runner resume RUN",
    "deadline": "its --deadline has passed, it would never start again: krea-runner stop RUN, or submit it with a later one",
    "vanished": "if that was a cancel: krea-runner stop RUN; if not: krea-runner resume RUN submits it again",
}
# Causes that come before the first step: no checkpoint can be expected of such an attempt, so none is waited for.
_BEFORE_ANY_STEP = frozenset({"launch_failed", "output_unwritable", "no_workdir"})


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a decision may depend on. `earlier` are this run's incidents, oldest first, without the one at hand."""

    finding: Finding
    policy: Policy
    earlier: Sequence[Incident]
    checkpoint_step: int | None
    exit_codes: frozenset[int]
    now: float
    checkpoints_unseen: bool = False
    """They could not be looked at: `checkpoint_step` None says nothing then."""
    requeue_allowed: bool | None = None
    """False also when Slurm has forgotten the job."""
    back_in_queue: bool = False
    """The job is at a later start already, by Slurm's own doing or somebody else's."""
    held_by: str = ""
    """Who holds the job that is back in the queue, as diagnose/end.py has it."""


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
    """One owner of restarts: what is back in the queue is waited for, not requeued again."""
    elsewhere = case.finding.symptom is Symptom.REQUEUED_ELSEWHERE
    if not (case.back_in_queue or elsewhere) or case.held_by in {"launch", "crash"}:
        return None
    if case.held_by == "requeue":
        return Decision(DecisionKind.WAIT, "held by somebody (requeuehold): scontrol release JOB lets it go on")
    if case.finding.symptom in {Symptom.NODE_FAIL, Symptom.PREEMPTED}:
        return Decision(DecisionKind.WAIT, "Slurm has requeued it by itself: taken over as the next attempt")
    return Decision(DecisionKind.WAIT, "already back in the queue: waiting for its next start")


def _never_restart(case: Case) -> Decision | None:
    never = {NEVER, *case.policy.never_restart_exit_codes} - set(case.policy.always_restart_exit_codes)
    codes = sorted(case.exit_codes & never)
    if codes and case.finding.symptom is Symptom.CRASH:
        return Decision(DecisionKind.HOLD, f"exit code {codes[0]} means: do not restart")
    return None


def _for_a_person(case: Case) -> Decision | None:
    what = _FOR_A_PERSON.get(case.finding.cause)
    return None if what is None else Decision(DecisionKind.HOLD, what)


def _is_always_restarted(case: Case) -> bool:
    always = case.exit_codes.intersection(case.policy.always_restart_exit_codes)
    return case.finding.symptom is Symptom.CRASH and bool(always)


def _diagnosed(case: Case) -> Decision | None:
    if _is_always_restarted(case):
        return None
    why = speaks_against_restart(case.finding, case.checkpoint_step, _since_last_hold(case.earlier))
    return Decision(DecisionKind.HOLD, why) if why else None


def _no_progress(case: Case) -> Decision | None:
    if _is_always_restarted(case):
        return None
    early = case.finding.cause in _BEFORE_ANY_STEP
    if case.finding.symptom not in CHARGED or (case.checkpoint_step is None and not early):
        return None  # unknown progress never counts as none
    fruitless = 0
    for incident in reversed(_since_last_hold(case.earlier)):
        if not _same_failure(incident.finding, case.finding) or incident.checkpoint_step != case.checkpoint_step:
            break
        fruitless += 1
    if fruitless < case.policy.no_progress_limit:
        return None
    newer = "any checkpoint" if case.checkpoint_step is None else f"a checkpoint newer than step {case.checkpoint_step}"
    return Decision(
        DecisionKind.HOLD,
        f"the same {case.finding.symptom.value} ({case.finding.known_cause}) {fruitless + 1} times without {newer}",
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
    _for_a_person,
    _never_restart,
    _diagnosed,
    _no_progress,
    _over_budget,
    _observe_only,
)


def _restart(case: Case) -> Decision:
    source = "from the start" if case.checkpoint_step is None else f"from step {case.checkpoint_step}"
    if case.checkpoint_step is None and case.checkpoints_unseen:
        source = "from where the script finds its last checkpoint (could not see the checkpoints)"
    kind, how = DecisionKind.REQUEUE, "same job"
    if case.held_by in {"launch", "crash"}:
        how = "Slurm has requeued it and holds it: released"
    elif case.requeue_allowed is False:
        kind, how = DecisionKind.RESUBMIT, "as a new job, this one cannot be requeued"
    if case.finding.symptom not in CHARGED:
        return Decision(kind, f"{source}, {how}; not a crash, budget not charged")
    spent = restarts_in_window(case.earlier, case.policy, case.now) + 1
    return Decision(kind, f"{source}, {how}; restart {spent} of {case.policy.max_restarts}")


def restarts_in_window(incidents: Sequence[Incident], policy: Policy, now: float) -> int:
    """How much of the budget is used: restarts that were charged, of one run, oldest first."""
    since = now - policy.window_s
    return sum(
        incident.decision.kind in RESTARTS and incident.finding.symptom in CHARGED and incident.noticed_at >= since
        for incident in _since_last_hold(incidents)
    )


def _since_last_hold(earlier: Sequence[Incident]) -> Sequence[Incident]:
    """A person who let a held run go on gave it a new budget."""
    for index in range(len(earlier) - 1, -1, -1):
        if earlier[index].decision.kind is DecisionKind.HOLD:
            return earlier[index + 1 :]
    return earlier


def _same_failure(one: Finding, other: Finding) -> bool:
    """As they showed; two that are surely of different causes are two failures all the same."""
    if (one.symptom, one.cause) != (other.symptom, other.cause):
        return False
    told = [finding.diagnosis for finding in (one, other) if finding.diagnosis is not None]
    return len(told) < 2 or not all(each.is_sure for each in told) or told[0].cause == told[1].cause
