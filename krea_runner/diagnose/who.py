"""Who hung the gang, as far as heartbeats tell: which ranks fell silent, which stopped first, which only wait. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from krea_runner.model import Watch
from krea_runner.model.many import by_the_thousand

# The client flushes once a second (heartbeat.py): three missed flushes are the least that can mean anything.
FLUSH_SILENT_S = 3.0
# A flush that comes this many times later than any before it came is silent.
LAG_MARGIN = 1.5
NAMED = 4  # ranks a line has room for


@by_the_thousand
class RankAge:
    """How long a rank has not beaten, and how long it may."""

    rank: int
    node: str
    phase: str
    step: int
    beat: int
    age_s: float
    budget_s: float
    flush_age_s: float | None  # None: never wrote
    is_learned: bool = False
    why: str = ""

    @property
    def left_s(self) -> float:
        return self.budget_s - self.age_s


@dataclass(frozen=True, slots=True)
class Blame:
    cause: str
    ranks: Sequence[RankAge]
    """To look at first; empty: no one stands out."""
    reason: str
    """What they did, in words."""


def split_by_flush(ages: Sequence[RankAge], watch: Watch) -> tuple[list[RankAge], list[RankAge]]:
    """The ranks whose process or node is silent, and those whose flusher lives."""
    lag_s = watch.learned.lag_s * LAG_MARGIN

    def is_silent(age: RankAge) -> bool:
        least_s = max(FLUSH_SILENT_S, age.budget_s / 2, min(lag_s, age.budget_s))
        return age.flush_age_s is None or age.flush_age_s >= least_s

    silent = [age for age in ages if is_silent(age)]
    return silent, [age for age in ages if not is_silent(age)]


def blame(ages: Sequence[RankAge], watch: Watch) -> Blame:
    silent, flushing = split_by_flush(ages, watch)
    if not flushing:
        return Blame("all_silent", [], "all silent (processes stopped, or the file system)")
    if silent:
        return _silent(silent, flushing)
    return _stuck(ages, watch)


def _silent(silent: list[RankAge], flushing: list[RankAge]) -> Blame:
    nodes = {age.node for age in silent if age.node}
    if all(age.flush_age_s is None for age in silent):
        return Blame("rank_never_started", silent, "never wrote a heartbeat")
    if not nodes or any(age.node in nodes for age in flushing):
        return Blame("rank_stopped", silent, "stopped: neither beats nor flushes")
    if len(nodes) > 1:
        return Blame("node_silent", silent, f"silent as {len(nodes)} whole nodes")
    if len(silent) > 1:
        return Blame("node_silent", silent, "silent as a whole node")
    return Blame("rank_stopped", silent, "stopped, the process or its node: neither beats nor flushes")


def _stuck(ages: Sequence[RankAge], watch: Watch) -> Blame:
    """All flushers live. Steps tell who is behind; then phases, who does something else; then the time, who froze first. Beat
    counters do not: a rank that saves for all others has beaten more often."""
    newest = max(age.step for age in ages)
    behind = [age for age in ages if age.step < newest]
    if behind:
        least = min(age.step for age in ages)
        first = [age for age in behind if age.step == least]
        return Blame("loop_stuck", first, f"stopped stepping first, {_rest(ages, first, f'at step {newest}')}")
    phase, count = Counter(age.phase for age in ages).most_common(1)[0]
    if len(ages) / 2 < count < len(ages):
        odd = [age for age in ages if age.phase != phase]
        doing = ", ".join(sorted({age.phase for age in odd}))
        return Blame("loop_stuck", odd, f"stuck in {doing}, {_rest(ages, odd, f'in {phase}')}")
    oldest = max(age.age_s for age in ages)
    margin_s = max(FLUSH_SILENT_S, 2 * watch.look_s, LAG_MARGIN * watch.learned.lag_s)
    first = [age for age in ages if age.age_s > oldest - margin_s]
    if len(first) < len(ages):
        return Blame("loop_stuck", first, f"stopped beating first, {_rest(ages, first, 'later')}")
    return Blame("loop_stuck", [], "stuck in the same place")


def _rest(ages: Sequence[RankAge], first: Sequence[RankAge], where: str) -> str:
    waiting = len(ages) - len(first)
    return f"{waiting} other{'s' if waiting > 1 else ''} wait{'' if waiting > 1 else 's'} {where}"


def ranks_in_words(numbers: Sequence[int]) -> str:
    shown = ",".join(map(str, numbers[:NAMED])) + (f",… ({len(numbers)})" if len(numbers) > NAMED else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def nodes_in_words(names: Sequence[str]) -> str:
    return ",".join(names[:NAMED]) + (f",… ({len(names)})" if len(names) > NAMED else "")
