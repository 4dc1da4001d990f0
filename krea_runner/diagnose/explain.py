"""Why a gang is, or is not, judged to hang: each rule with what it looks at, what it waits for, and what holds it back. Pure."""

from dataclasses import dataclass

from krea_runner.diagnose.hang import (
    ALL_SILENT_S,
    judge_hang,
    live_ages,
    longer_wait_left_s,
    second_signal,
    slow_line,
    unseen_line,
)
from krea_runner.diagnose.who import RankAge, ranks_in_words, split_by_flush
from krea_runner.model import JobState, Learned, Snapshot, Watch
from krea_runner.model.learned import RULES, slow_above_s


@dataclass(frozen=True, slots=True)
class RuleState:
    """Seconds; None: it does not apply, or is not known here."""

    rule: str
    value_s: float | None
    budget_s: float | None
    left_s: float | None
    why: str
    """Where the budget comes from, or what the rule found."""
    blocked_by: str = ""
    """What keeps it from meaning anything now; empty: nothing but the time that is left."""


@dataclass(frozen=True, slots=True)
class PhaseBudget:
    phase: str
    budget_s: float
    why: str
    waits: int = 0
    usual_s: float | None = None
    most_s: float | None = None
    """What 19 of 20 waits stay under."""
    longest_s: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    judgement: str
    rules: tuple[RuleState, ...]
    budgets: tuple[PhaseBudget, ...]
    blind_for_s: float | None = None
    """How long some rank that was there before cannot be read; None: all can."""


def explain_hang(snapshot: Snapshot, remembered: Watch | None, judgement: str = "") -> Explanation:
    """`remembered` is the supervisor's own memory, of this attempt or the one before. `judgement`: what is said where
    the snapshot's clock is not the one by which it is watched; then no rule is judged here."""
    watch, job = snapshot.watch, snapshot.job
    source = watch if watch is not None and watch.learned.waits else remembered
    budgets = _phase_budgets(snapshot, source)
    if judgement:
        return Explanation(judgement, (), budgets)
    said = judge_hang(snapshot).line
    if watch is None or job is None or job.state is not JobState.RUNNING or not watch.ranks:
        return Explanation(said, (), budgets)
    since = watch.unseen_since_mono
    ages = live_ages(snapshot, watch)
    rules = _rules(snapshot, watch, ages) if ages else ()
    return Explanation(said, rules, budgets, None if since is None else snapshot.mono - since)


def _rules(snapshot: Snapshot, watch: Watch, ages: list[RankAge]) -> tuple[RuleState, ...]:
    blind = unseen_line(snapshot, watch)
    patient = max(ages, key=lambda age: age.left_s)
    all_late = patient.left_s <= 0
    agreed = second_signal(watch, snapshot.mono, ages)
    only_looks = "mode = observe: it is said, not done" if snapshot.run.config.policy.mode == "observe" else ""
    groups: dict[tuple[str, float], list[RankAge]] = {}
    for age in ages:
        groups.setdefault((age.phase, age.budget_s), []).append(age)
    rows = []
    for (phase, budget_s), members in groups.items():
        youngest = min(members, key=lambda age: age.age_s)
        blocked = blind or (
            f"rank {patient.rank} in {patient.phase} has {patient.left_s:.0f} s left"
            if youngest.left_s <= 0 and not all_late
            else only_looks
        )
        who = ranks_in_words([age.rank for age in members])
        rows.append(
            RuleState(f"no beat in {phase}: {who}", youngest.age_s, budget_s, youngest.left_s, youngest.why, blocked)
        )
    waits_for_all = "" if all_late else "asked once every rank is past its budget"
    silent, flushing = split_by_flush(ages, watch)
    log_s = snapshot.mono - watch.log_moved_mono if watch.log_size_bytes else None
    least_s = min(age.budget_s for age in ages)
    found = f"{len(silent)} of {len(ages)} ranks write no heartbeat" if silent else "every rank's heartbeat is written"
    if not flushing:
        found += ": that may be the file system, so the logs do not count either"
    rows.append(
        RuleState(
            "a second signal: logs silent, or some ranks' heartbeats",
            log_s,
            least_s,
            None if log_s is None else least_s - log_s,
            agreed or found,
            blind or waits_for_all,
        )
    )
    times = snapshot.run.config.budgets.second_look
    longer_s = longer_wait_left_s(snapshot, watch, ages)
    why = f"{times:g} times the budget" + (f", {ALL_SILENT_S:g} s at least: all silent" if not flushing else "")
    frozen_s = min(age.age_s for age in ages)
    rows.append(
        RuleState(
            "without a second signal, a longer wait", frozen_s, frozen_s + longer_s, longer_s, why, blind or only_looks
        )
    )
    steps = watch.learned.of("step")
    rows.append(
        RuleState(
            "slow, which is told and never acted upon",
            watch.learned.recent_s or None,
            None if steps is None else slow_above_s(steps),
            None,
            slow_line(watch) or "what a step takes at present; slow: three times the usual, for 10 min",
        )
    )
    return tuple(rows)


def _phase_budgets(snapshot: Snapshot, watch: Watch | None) -> tuple[PhaseBudget, ...]:
    learned = watch.learned if watch is not None else Learned()
    more = [waits.phase for waits in learned.waits if waits.phase not in RULES]
    rows = []
    for phase in [*RULES, *more, "default"]:
        budget = learned.budget(phase, snapshot.run.config.budgets)
        waits = learned.of(phase)
        if waits is None:
            rows.append(PhaseBudget(phase, budget.seconds, budget.why))
            continue
        quantiles = waits.quantile_s(0.5), waits.quantile_s(0.95)
        rows.append(PhaseBudget(phase, budget.seconds, budget.why, waits.count, *quantiles, waits.longest_s))
    return tuple(rows)
