"""What a run's own healthy waits teach: how long it may go without a beat, and whether it has become slow.

Pure, and bounded: a dozen phases of some twenty numbers. A wait is what the watcher itself saw, so the interval of its looks
and the delay of the file system are in it. docs/design/hang-detection.md says why the numbers are what they are.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from krea_runner.model.settings import Budgets

# NFS keeps attributes for 60 s (acregmax), and servers were seen to show changes in lumps of 90 s (nfs-ganesha issue 294).
VISIBLE_S = 90.0
WARM_UP_STEPS = 5  # of an attempt; they compile, capture graphs and fill caches (as nvidia-resiliency-ext exempts them)
HALF_LIFE_S = 6 * 3600.0  # of what a wait weighs: slow drift is followed
LONGEST_HALF_LIFE_S = 24 * 3600.0
PHASES_KEPT = 12  # a job may name as many phases as it likes
_BINS_AN_OCTAVE = 4
_LEAST_WEIGHT = 1e-3

# Steps are called slow at this many times their usual length, for this long.
SLOW = 3.0
SLOW_FOR_S = 600.0
SLOW_WEIGHT = 0.1  # of such a step among those that tell what is usual: it takes long to become that
_RECENT_S = 300.0  # the memory of how long steps take at present


@dataclass(frozen=True, slots=True)
class Rule:
    """How a phase's budget follows from its waits: so many times the usual one (median), what 19 of 20 stay under, and the
    longest; never below `floor_s` nor above `ceiling_s`. Until `enough` waits and `watched_s` seconds were seen, it is not
    below the value that holds without any history either."""

    floor_s: float
    ceiling_s: float
    usual: float = 2.0
    most: float = 2.0
    longest: float = 3.0
    enough: int = 5
    watched_s: float = 0.0


RULES = {
    "startup": Rule(900, 7200, enough=1),
    "compile": Rule(300, 3600),
    "step": Rule(120, 3600, usual=5, most=3, longest=2, enough=20, watched_s=3600),
    "data": Rule(120, 3600, usual=5, most=3, longest=2, enough=20, watched_s=3600),
    "checkpoint": Rule(600, 7200),
    "evaluation": Rule(600, 7200),
    "shutdown": Rule(300, 3600),
}
OTHER = Rule(600, 7200)


@dataclass(frozen=True, slots=True)
class Budget:
    seconds: float
    why: str
    is_learned: bool = False
    """Or fixed: by run.toml or by the rank itself."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Of one phase. `bins` is a histogram of waits in quarter octaves, (number, weight); weights and `longest_s` fade with the
    time that is watched, whose reading at the last wait is `at_s`."""

    phase: str
    count: int = 0
    watched_s: float = 0.0
    longest_s: float = 0.0
    at_s: float = 0.0
    bins: tuple[tuple[int, float], ...] = ()

    def with_wait(
        self, usual_s: float, longest_s: float, during_s: float, now_s: float, weight: float = 1.0
    ) -> "Waits":
        passed_s = max(0.0, now_s - self.at_s)
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        number = round(math.log2(max(usual_s, 1e-3)) * _BINS_AN_OCTAVE)
        weights = {known: had * kept for known, had in self.bins if had * kept > _LEAST_WEIGHT}
        weights[number] = weights.get(number, 0.0) + weight
        return Waits(
            phase=self.phase,
            count=self.count + 1,
            watched_s=self.watched_s + during_s,
            longest_s=max(longest_s, self.longest_s * 0.5 ** (passed_s / LONGEST_HALF_LIFE_S)),
            at_s=now_s,
            bins=tuple(sorted(weights.items())),
        )

    def quantile_s(self, share: float) -> float:
        """The wait that this share of the weight does not exceed, to a quarter octave; 0 without waits."""
        left = share * sum(weight for _, weight in self.bins)
        for number, weight in self.bins:
            left -= weight
            if left <= 1e-9:
                return float(2 ** (number / _BINS_AN_OCTAVE))
        return 0.0


@dataclass(frozen=True, slots=True)
class Learned:
    """Goes from an attempt to the next, and from one watching host to another: no reading of a clock is in it."""

    waits: tuple[Waits, ...] = ()
    watched_s: float = 0.0
    """In all, while the gang moved."""
    lag_s: float = 0.0
    """The longest that a flush which came in the end was not seen, fading."""
    recent_s: float = 0.0
    """What a step takes at present; 0: not known."""
    slow_for_s: float = 0.0

    def of(self, phase: str) -> Waits | None:
        return next((waits for waits in self.waits if waits.phase == phase), None)

    def with_wait(self, phase: str, usual_s: float, longest_s: float, during_s: float) -> "Learned":
        """After the gang has moved again: beats `usual_s` apart, `longest_s` of silence at most, in a stretch of `during_s`."""
        now_s = self.watched_s + during_s
        known = self.of(phase)
        if known is None and len(self.waits) >= PHASES_KEPT:
            return replace(self, watched_s=now_s)
        others = [waits for waits in self.waits if waits.phase != phase]
        recent_s, slow_for_s, is_slow = self.recent_s, self.slow_for_s, False
        if phase == "step":
            recent_s = _towards(recent_s, usual_s, during_s)
            is_slow = known is not None and _is_known(known) and recent_s >= slow_above_s(known)
            slow_for_s = slow_for_s + during_s if is_slow else 0.0
        weight = SLOW_WEIGHT if is_slow else 1.0
        after = (known or Waits(phase, at_s=now_s)).with_wait(usual_s, longest_s, during_s, now_s, weight)
        return replace(
            self, waits=(*others, after), watched_s=now_s, recent_s=recent_s, slow_for_s=slow_for_s,
            lag_s=self.lag_s * 0.5 ** (during_s / LONGEST_HALF_LIFE_S),
        )  # fmt: skip

    def at_border(self) -> "Learned":
        """For the next attempt: what is of the present only is left out."""
        return replace(self, recent_s=0.0, slow_for_s=0.0)

    @property
    def is_slow(self) -> bool:
        return self.slow_for_s >= SLOW_FOR_S

    def budget(self, phase: str, budgets: Budgets, *, warm_up: bool = False) -> Budget:
        """`warm_up`: the attempt has not done its first steps yet."""
        if phase in budgets.fixed or (phase not in RULES and "default" in budgets.fixed):
            return Budget(budgets.for_phase(phase), "run.toml")
        if phase == "step" and warm_up:
            first = self.budget("compile", budgets)
            after = self.budget("step", budgets)
            return replace(first if first.seconds >= after.seconds else after, is_learned=True)
        waits = self.of(phase)
        without_s = budgets.for_phase(phase)
        if (
            phase == "step" and (first_steps := self.of("compile")) is not None
        ):  # the best that is known of steps so far
            without_s = max(without_s, first_steps.longest_s * RULES["compile"].longest)
        return _learned_budget(waits, RULES.get(phase, OTHER), without_s)


def learned_of(document: Any) -> Learned:
    """From its JSON. Raises: TypeError, when another version wrote it."""
    if document is None:
        return Learned()
    waits = [Waits(**one | {"bins": tuple((int(n), float(w)) for n, w in one["bins"])}) for one in document["waits"]]
    return Learned(**document | {"waits": tuple(waits)})


def _is_known(waits: Waits) -> bool:
    rule = RULES.get(waits.phase, OTHER)
    return waits.count >= rule.enough and waits.watched_s >= rule.watched_s


def slow_above_s(steps: Waits) -> float:
    """Steps that take this long are slow: also by how uneven they are anyway."""
    return max(SLOW * steps.quantile_s(0.5), steps.quantile_s(0.95))


def _learned_budget(waits: Waits | None, rule: Rule, without_s: float) -> Budget:
    if waits is None:
        return Budget(without_s, "nothing learned yet", is_learned=True)
    usual_s, most_s = waits.quantile_s(0.5), waits.quantile_s(0.95)
    terms = {
        f"{rule.usual:g} times the usual {usual_s:.1f} s": rule.usual * usual_s,
        f"{rule.most:g} times {most_s:.1f} s, which 19 of 20 stay under": rule.most * most_s,
        f"{rule.longest:g} times the longest, {waits.longest_s:.1f} s": rule.longest * waits.longest_s,
        f"the longest, {waits.longest_s:.1f} s, seen {VISIBLE_S:g} s late": waits.longest_s + VISIBLE_S,
    }
    if _is_known(waits):
        terms["the least for this phase"] = rule.floor_s
    else:
        wanted_s = f"{min(waits.watched_s, rule.watched_s) / 60:.0f} of {rule.watched_s / 60:.0f} min"
        seen = wanted_s if waits.count >= rule.enough else f"{waits.count} of {rule.enough} waits"
        terms[f"still learning, {seen} seen"] = max(without_s, rule.floor_s)
    why = max(terms, key=lambda term: terms[term])
    if terms[why] > rule.ceiling_s:
        return Budget(rule.ceiling_s, f"the most for this phase; {why} would be {terms[why]:.0f} s", is_learned=True)
    return Budget(terms[why], why, is_learned=True)


def _towards(recent_s: float, seen_s: float, during_s: float) -> float:
    """A mean of logarithms that forgets: one long step hardly moves it."""
    if not recent_s:
        return seen_s
    share = 1.0 - math.exp(-during_s / _RECENT_S)
    return math.exp((1 - share) * math.log(recent_s) + share * math.log(max(seen_s, 1e-3)))
