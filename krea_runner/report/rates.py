"""How often runs are interrupted, with the interval that the count allows. Pure; docs/reference/metrics.md defines the words."""

import math
from collections.abc import Callable
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Rate:
    """`count` interruptions in `hours` of running on `node_hours`. Infinite where nothing was counted or no time passed."""

    count: int
    hours: float
    node_hours: float

    @property
    def mtbf_h(self) -> float:
        return _ratio(self.hours, self.count)

    @property
    def mtbf_interval_h(self) -> tuple[float, float]:
        low, high = count_interval(self.count)
        return _ratio(self.hours, high), _ratio(self.hours, low)

    @property
    def per_1000_node_days(self) -> float:
        return _ratio(self.count * 24_000.0, self.node_hours)

    @property
    def per_1000_node_days_interval(self) -> tuple[float, float]:
        low, high = count_interval(self.count)
        return _ratio(low * 24_000.0, self.node_hours), _ratio(high * 24_000.0, self.node_hours)


def count_interval(count: int, level: float = LEVEL) -> tuple[float, float]:
    """The means of a Poisson distribution that `count` does not contradict: exact, from the chi-square distribution with
    2·count and 2·count + 2 degrees of freedom (Garwood, Biometrika 28, 1936)."""
    tail = (1.0 - level) / 2
    low = 0.0 if count == 0 else _mean_at(count, lambda mean: reaches(count, mean) < tail)
    return low, _mean_at(count + 1, lambda mean: reaches(count + 1, mean) < 1.0 - tail)


def reaches(count: int, mean: float) -> float:
    """The probability that a Poisson distribution of this mean gives `count` or more; `count` is at least 1. It is the
    regularized lower incomplete gamma function P(count, mean), by its series below count + 1 and by Lentz's continued
    fraction above (Abramowitz and Stegun 6.5.29 and 6.5.31)."""
    if mean <= 0.0:
        return 0.0
    scale = math.exp(count * math.log(mean) - mean - math.lgamma(count))
    if mean < count + 1:
        term = total = 1.0 / count
        step = float(count)
        while term > total * 1e-16:
            step += 1.0
            term *= mean / step
            total += term
        return min(1.0, total * scale)
    b = mean + 1.0 - count
    c, d = 1e300, 1.0 / b
    fraction, change, n = d, 0.0, 0
    while abs(change - 1.0) > 1e-15 and n < 1_000_000:
        n += 1
        a = n * (count - n)
        b += 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        change = c * d
        fraction *= change
    return max(0.0, 1.0 - fraction * scale)


def _mean_at(count: int, is_below: Callable[[float], bool]) -> float:
    """Where `is_below` turns false, by halving."""
    low, high = 0.0, count + 12.0 * math.sqrt(count) + 12.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in {low, high}:
            break
        if is_below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _ratio(value: float, by: float) -> float:
    return math.inf if by == 0 else value / by
