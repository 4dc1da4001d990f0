"""What a run's own history says about how often it should save. Pure; what was measured and what was assumed is kept apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from krea_runner.decide.decision import CHARGED
from krea_runner.decide.interval import Costs, best_interval_s, ettr, failure_rate_bounds, young_interval_s
from krea_runner.model import Attempt, Incident

# Where nothing was measured. A restart of 5 to 20 minutes was observed at Meta (arXiv 2410.21680), failures at 3.79 for 1000
# node-days by Llama 3 (arXiv 2407.21783, table 5); a terabyte in half a minute is what a fast file system does.
ASSUMED_RESTART_S = 600.0
ASSUMED_STALL_S = 30.0
ASSUMED_FAILURES_PER_NODE_S = 3.79 / (1000 * 86400)
MONTH_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Value:
    """Seconds, and where they are from: `given`, `measured: ...` or `assumed: ...`."""

    seconds: float
    source: str


@dataclass(frozen=True, slots=True)
class Choice:
    """`gained_gpu_s`: more than now in 30 days; negative is less."""

    what: str
    interval_s: float
    ettr: float
    gained_gpu_s: float


@dataclass(frozen=True, slots=True)
class Advice:
    """`mtbf_bounds_s` are 95 % bounds, None where the rate was not measured."""

    mtbf: Value
    mtbf_bounds_s: tuple[float, float] | None
    restart: Value
    stall: Value
    interval: Value | None
    gpus: int
    now: Choice | None
    best: Choice
    best_bounds_s: tuple[float, float] | None
    young_s: float
    choices: tuple[Choice, ...]
    """Other ways to gain, each at its own best interval."""


def measured_mtbf(attempts: Sequence[Attempt], incidents: Sequence[Incident], *, now: float) -> tuple[int, float]:
    """Failures that cost a restart, and the seconds in which they came: of attempts that ran."""
    ran = sum(max(0.0, (one.ended_at or now) - one.started_at) for one in attempts if one.started_at is not None)
    return sum(one.finding.symptom in CHARGED for one in incidents), ran


def measured_restart(incidents: Sequence[Incident]) -> Value | None:
    """From the last sign of progress to the first step after the restart, the median of those that came back."""
    times = [
        (one.notice_s or 0.0) + one.resume_s
        for one in incidents
        if one.resume_s is not None and one.finding.symptom in CHARGED
    ]
    return Value(median(times), f"measured: median of {len(times)} restarts") if times else None


def advise(
    *,
    failures: tuple[int, float],
    nodes: int,
    gpus: int,
    mtbf_s: float | None = None,
    restart: Value | None = None,
    stall: Value | None = None,
    interval: Value | None = None,
    faster: float = 4.0,
    async_stall_s: float = 5.0,
) -> Advice:
    """`failures` as `measured_mtbf` has them; `mtbf_s` where the user knows better. `faster`: by how much a faster file system
    would shorten the stall."""
    mtbf, bounds = _mtbf(failures, nodes, mtbf_s)
    restart = restart or Value(ASSUMED_RESTART_S, "assumed: 5 to 20 minutes are usual")
    stall = stall or Value(ASSUMED_STALL_S, "assumed")
    costs = Costs(mtbf.seconds, restart.seconds, stall.seconds)
    now_ettr = ettr(costs, interval.seconds) if interval else ettr(costs, best_interval_s(costs))

    def choice(what: str, changed: Costs, at: float | None = None) -> Choice:
        at = at or best_interval_s(changed)
        value = ettr(changed, at)
        return Choice(what, at, value, (value - now_ettr) * MONTH_S * gpus)

    other = [choice(f"a file system {faster:g} times as fast", replace(costs, stall_s=stall.seconds / faster))]
    if stall.seconds > async_stall_s:
        drained = replace(costs, stall_s=async_stall_s, drain_s=stall.seconds)
        other.append(choice(f"asynchronous saves ({async_stall_s:g} s of stall)", drained))
    other.append(choice("restarts in half the time", replace(costs, restart_s=restart.seconds / 2)))
    return Advice(
        mtbf=mtbf, mtbf_bounds_s=bounds, restart=restart, stall=stall, interval=interval, gpus=gpus,
        now=choice("as now", costs, interval.seconds) if interval else None,
        best=choice("at the best interval", costs),
        best_bounds_s=None if bounds is None else (
            best_interval_s(replace(costs, mtbf_s=bounds[0])), best_interval_s(replace(costs, mtbf_s=bounds[1]))
        ),
        young_s=young_interval_s(costs), choices=tuple(other),
    )  # fmt: skip


def _mtbf(failures: tuple[int, float], nodes: int, given_s: float | None) -> tuple[Value, tuple[float, float] | None]:
    count, ran_s = failures
    if given_s is not None:
        return Value(given_s, "given"), None
    if count == 0 or ran_s <= 0:
        rate = ASSUMED_FAILURES_PER_NODE_S * nodes
        return Value(
            1 / rate, f"assumed: 3.79 failures in 1000 node-days on {nodes} nodes; this run has had none"
        ), None
    low, high = failure_rate_bounds(count)
    source = f"measured: {count} failure{'s' * (count != 1)} in {ran_s / 3600:.1f} h"
    return Value(ran_s / count, source), (ran_s / high, ran_s / low)
