"""How often to save. Pure arithmetic; all times in seconds.

The model is Daly's complete one (A higher order estimate of the optimum checkpoint interval, 2006,
doi 10.1016/j.future.2004.11.016): failures come at random, at a constant rate, and also while saving and restarting. Its
ETTR (productive time over all time) follows a simulation within one per cent also where a run hardly gets on any more,
where the usual first-order formula gives nonsense (tests/unit/test_interval.py holds both).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

LONGEST = 700.0  # exp() of more is no number


@dataclass(frozen=True, slots=True)
class Costs:
    """`mtbf_s`: mean time between failures. `restart_s`: from a failure to the first new step, detection included. `stall_s`:
    for how long a save stops the training. `drain_s`: for how long after that an asynchronous save is not yet whole."""

    mtbf_s: float
    restart_s: float
    stall_s: float
    drain_s: float = 0.0


def ettr(costs: Costs, interval_s: float) -> float:
    """Expected effective-training-time ratio with `interval_s` of training between two saves; 0 where nothing gets on.

    What an asynchronous save has not finished is lost too: its `drain_s` is lost at each failure, as a longer restart would be.
    """
    mtbf = costs.mtbf_s
    lost, piece = (costs.restart_s + costs.drain_s) / mtbf, (interval_s + costs.stall_s) / mtbf
    if lost > LONGEST or piece > LONGEST:
        return 0.0
    return interval_s / (mtbf * math.exp(lost) * math.expm1(piece))


def best_interval_s(costs: Costs) -> float:
    """Where `ettr` is highest, to a tenth of a per cent; never shorter than a save takes to be whole (two would overlap)."""
    least = max(costs.stall_s + costs.drain_s, 1.0)
    low, high = math.log(least), math.log(max(least * 2, costs.mtbf_s * 20))
    return math.exp(_highest(lambda at: ettr(costs, math.exp(at)), low, high))


def _highest(f: Callable[[float], float], low: float, high: float) -> float:
    """Of a function with one peak, by thirds."""
    while high - low > 1e-3:
        one, other = low + (high - low) / 3, high - (high - low) / 3
        if f(one) < f(other):
            low = one
        else:
            high = other
    return (low + high) / 2


def young_interval_s(costs: Costs) -> float:
    """The first-order formula that everybody knows; for comparison."""
    return math.sqrt(2 * costs.stall_s * costs.mtbf_s)


def failure_rate_bounds(failures: int, *, share: float = 0.95) -> tuple[float, float]:
    """Between which numbers of failures the expected number lies, with the certainty `share`: exact Poisson bounds."""
    tail = (1 - share) / 2
    upper = _solve(
        lambda mean: _poisson_at_most(failures, mean) - tail, failures, failures + 12 * math.sqrt(failures + 1)
    )
    if failures == 0:
        return 0.0, upper
    lower = _solve(lambda mean: 1 - _poisson_at_most(failures - 1, mean) - tail, 0.0, float(failures))
    return lower, upper


def _poisson_at_most(count: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    logs = [number * math.log(mean) - mean - math.lgamma(number + 1) for number in range(count + 1)]
    return math.fsum(math.exp(one) for one in logs)


def _solve(f: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that changes its sign once is zero."""
    rising = f(high) > f(low)
    for _ in range(80):
        middle = (low + high) / 2
        if (f(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2
