"""Is the gang stuck? Pure: a Snapshot in, a judgement out, never a clock read.

The rule (design §7, rules 4 to 6). A gang hangs when *every* rank is past the budget of the phase it is in: a synchronous
gang waits for its slowest member, so one rank that saves a checkpoint within its budget explains all that wait for
it. Then one independent signal must agree, or a longer budget must have passed. What could not be seen is never held
against a run. A gang that goes on, only far slower than it did, is said to be slow and left alone.
"""

from dataclasses import dataclass

from krea_runner.diagnose.progress import judge_progress
from krea_runner.diagnose.who import (
    FLUSH_SILENT_S,
    RankAge,
    blame,
    nodes_in_words,
    ranks_in_words,
    split_by_flush,
)
from krea_runner.model import Budget, Finding, JobState, RankWatch, Snapshot, Suspect, Symptom, Watch

# No verdict sooner, whatever the budget: by then a silent flush is told from a live one, so that the right rank is named.
LEAST_BUDGET_S = FLUSH_SILENT_S + 0.5
# A file system that changes servers is away for minutes while the gang trains on: where nobody is seen any more, budgets that
# were learned wait this long at least.
ALL_SILENT_S = 600.0
OVER = "done"  # the phase of a rank that has closed its heartbeat: it owes no more beats
OFTEN = 0.5  # behind in so many looks: a node stands out


@dataclass(frozen=True, slots=True)
class HangJudgement:
    """`finding` is set when the gang hangs; `line` says in any case what is known, for `status`."""

    line: str
    finding: Finding | None = None
    blind: bool = False
    is_slow: bool = False


def judge_hang(snapshot: Snapshot) -> HangJudgement:
    watch, job = snapshot.watch, snapshot.job
    if snapshot.blind:
        return HangJudgement(snapshot.blind, blind=True)
    if watch is None or job is None or job.state is not JobState.RUNNING:
        return HangJudgement("not running")
    if not watch.ranks:
        return HangJudgement(*judge_progress(snapshot, watch))
    unseen = unseen_line(snapshot, watch)
    if unseen:
        return HangJudgement(unseen, blind=True)
    ages = live_ages(snapshot, watch)
    if not ages:
        return HangJudgement("every rank has finished")
    patient = max(ages, key=lambda age: age.left_s)
    if patient.left_s > 0:
        slow = slow_line(watch)
        return HangJudgement(slow or _progress_line(ages, patient), is_slow=bool(slow))

    agreed_by = second_signal(watch, snapshot.mono, ages)
    frozen_s = min(age.age_s for age in ages)
    if not agreed_by:
        left_s = longer_wait_left_s(snapshot, watch, ages)
        if left_s > 0:
            return HangJudgement(f"frozen {frozen_s:.0f} s, no second signal; judged a hang in {left_s:.0f} s")
        agreed_by = f"{snapshot.run.config.budgets.second_look:g} times the budget has passed"
    return HangJudgement(f"hung: frozen {frozen_s:.0f} s", _finding(watch, ages, frozen_s, agreed_by))


def unseen_line(snapshot: Snapshot, watch: Watch) -> str:
    """What of the ranks cannot be seen, and why; empty when all can."""
    problems = snapshot.heartbeats.problems
    unseen = {rank.rank for rank in watch.ranks} - {beat.rank for beat in snapshot.heartbeats.ranks}
    if unseen:
        why = problems[0] if problems else "its heartbeat is gone"
        return f"could not see {ranks_in_words(sorted(unseen))}: {why}"
    if not problems:
        return ""
    missing = sum(age.flush_age_s is None for age in live_ages(snapshot, watch))
    return f"could not see {missing} ranks: {problems[0]}" if missing else ""


def live_ages(snapshot: Snapshot, watch: Watch) -> list[RankAge]:
    """In the order of the ranks; those that have finished are left out."""
    config, learned, warm_up = snapshot.run.config, watch.learned, watch.is_warming_up
    known = {rank.rank: rank for rank in watch.ranks}
    budgets: dict[tuple[str, float | None], Budget] = {}
    # A gang that has stepped has all its ranks: one that never wrote does not take part (only rank 0 beats, say).
    stepped = any(rank.step >= 0 for rank in watch.ranks)
    world = sorted(known if stepped else {*range(config.gang.world_size), *known})

    def budget_of(phase: str, own_s: float | None) -> Budget:
        if (phase, own_s) not in budgets:
            budgets[phase, own_s] = (
                learned.budget(phase, config.budgets, warm_up=warm_up)
                if own_s is None
                else Budget(own_s, "given by the rank itself")
            )
        return budgets[phase, own_s]

    def age(number: int) -> RankAge:
        rank: RankWatch | None = known.get(number)
        phase = rank.phase if rank is not None else "startup"  # a rank that has never written is still starting
        budget = budget_of(phase, rank.phase_budget_s if rank is not None else None)
        least_s = LEAST_BUDGET_S if rank is not None else 0.0
        moved_mono = rank.beat_moved_mono if rank is not None else watch.since_mono
        return RankAge(
            number, rank.node if rank else "", phase, rank.step if rank else -1, rank.beat if rank else 0,
            snapshot.mono - moved_mono, max(budget.seconds, least_s),
            snapshot.mono - rank.flush_moved_mono if rank else None, budget.is_learned, budget.why,
        )  # fmt: skip

    return [one for one in map(age, world) if one.phase != OVER]


def slow_line(watch: Watch) -> str:
    """What is known of a gang whose steps take far longer than they did; empty when they do not."""
    learned = watch.learned
    steps = learned.of("step")
    if not learned.is_slow or steps is None:
        return ""
    times = learned.recent_s / steps.quantile_s(0.5)
    shares = sorted(((share, node) for node, share in watch.behind), reverse=True)
    if shares and shares[0][0] >= OFTEN and (len(shares) == 1 or shares[1][0] < shares[0][0] / 2):
        who = f"{shares[0][1]} is behind the others"
    else:
        who = "no node stands out by its heartbeats"
    usual_s = steps.quantile_s(0.5)
    return (
        f"slow, not hung: a step takes {learned.recent_s:.3g} s, {times:.1f} times the usual {usual_s:.3g} s, "
        f"for {learned.slow_for_s / 60:.0f} min; {who}"
    )


def _progress_line(ages: list[RankAge], patient: RankAge) -> str:
    late = [age for age in ages if age.left_s <= 0]
    if not late:
        return f"in progress, last beat {min(age.age_s for age in ages):.0f} s ago"
    return (
        f"{ranks_in_words([age.rank for age in late])} silent {late[0].age_s:.0f} s; "
        f"rank {patient.rank} is in {patient.phase}, {patient.left_s:.0f} s left"
    )


def second_signal(watch: Watch, mono: float, ages: list[RankAge]) -> str:
    """What agrees that nothing moves, in words; empty when nothing does.

    When nobody's flush arrives any more, the file system may be what stands still: then its silence, the logs' included,
    is one signal and not two.
    """
    silent, flushing = split_by_flush(ages, watch)
    if not flushing:
        return ""
    if silent:
        return f"{ranks_in_words([age.rank for age in silent])} writes no heartbeat at all while others do"
    log_silent_s = mono - watch.log_moved_mono
    if watch.log_size_bytes and log_silent_s >= min(age.budget_s for age in ages):
        return f"logs silent {log_silent_s:.0f} s"
    return ""


def longer_wait_left_s(snapshot: Snapshot, watch: Watch, ages: list[RankAge]) -> float:
    """How long until the budgets alone are enough."""
    times = snapshot.run.config.budgets.second_look
    _, flushing = split_by_flush(ages, watch)

    def wait_s(age: RankAge) -> float:
        return max(age.budget_s * times, ALL_SILENT_S if age.is_learned and not flushing else 0.0)

    return max(wait_s(age) - age.age_s for age in ages)


def _finding(watch: Watch, ages: list[RankAge], frozen_s: float, agreed_by: str) -> Finding:
    who = blame(ages, watch)
    nodes = sorted({age.node for age in who.ranks if age.node})
    last = who.ranks[0] if who.ranks else max(ages, key=lambda age: age.step)
    where = f" on {nodes_in_words(nodes)}" if nodes else ""
    step = max(age.step for age in ages)
    whom = ranks_in_words([age.rank for age in who.ranks]) if who.ranks else "the whole gang"
    return Finding(
        symptom=Symptom.HANG,
        cause=who.cause,
        summary=f"hang: {whom}{where} {who.reason}, no progress for {frozen_s:.0f} s in {last.phase} at step {max(step, 0)}",
        node=",".join(nodes),
        step=step if step >= 0 else None,
        last_progress_at=watch.moved_wall_at,
        evidence=tuple(
            f"rank {age.rank} {age.node or '-'}: {age.phase} step {age.step} beat {age.beat} frozen {age.age_s:.1f} s "
            f"(budget {age.budget_s:g} s: {age.why}), "
            + ("never wrote" if age.flush_age_s is None else f"flush frozen {age.flush_age_s:.1f} s")
            for age in ages
        ),
        suspects=tuple(Suspect("rank", str(age.rank), who.reason) for age in who.ranks)
        + tuple(Suspect("node", node, who.reason) for node in nodes),
        agreed_by=agreed_by,
    )
