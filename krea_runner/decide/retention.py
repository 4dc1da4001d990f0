"""Which checkpoints may go. Pure: what there is and what must not be touched in, one line each out.

A checkpoint goes only when a rule was given, no rule keeps it, and nothing protects it. What is not known keeps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """The user's rules. `every`: steps that it divides. `best`: that many with the lowest `metric` (or highest)."""

    last: int = 0
    every: int = 0
    best: int = 0
    highest: bool = False
    unfinished: bool = True
    """False: half-written ones that were given up may go too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`state` as observe's examination says it; `value` of the metric, None where it is not known."""

    name: str
    step: int | None
    state: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Fate:
    name: str
    goes: bool
    why: str


def retention(
    candidates: Sequence[Candidate], kept: Kept, *, protected: Mapping[str, str], needed: Collection[int] = (),
    left: Collection[str] = (),
) -> list[Fate]:  # fmt: skip
    """One Fate each, in the order given. `protected`: names and why; `needed`: steps that a live attempt has loaded; `left`:
    names of those that a run has stepped back from.

    The newest whole one is always kept, and so is the one before it, of those that were not left: a run may have to step back
    to it.
    """
    whole = sorted(
        (one for one in candidates if one.state == "whole" and one.step is not None), key=_step, reverse=True
    )
    reasons: dict[str, str] = dict(protected)
    for one in candidates:
        if one.step is not None and one.step in needed:
            reasons.setdefault(one.name, "a live attempt has loaded it")
    for one in whole[:1]:
        reasons.setdefault(one.name, "the newest whole one")
    usable = [one for one in whole if one.name not in left]
    for one, why in zip(usable, ("what a run resumes from", "what a run would step back to"), strict=False):
        reasons.setdefault(one.name, why)
    rules = {one.name: f"one of the last {kept.last}" for one in whole[: kept.last]}
    if kept.best:
        known = sorted((one for one in whole if one.value is not None), key=lambda one: one.value or 0.0)
        best = known[-kept.best :] if kept.highest else known[: kept.best]
        rules |= {one.name: f"one of the {kept.best} best ({one.value:g})" for one in best}
    return [_fate(one, kept, reasons, rules) for one in candidates]


def _fate(one: Candidate, kept: Kept, reasons: Mapping[str, str], rules: Mapping[str, str]) -> Fate:
    if one.name in reasons:
        return Fate(one.name, False, reasons[one.name])
    if one.state == "unfinished":
        return Fate(one.name, not kept.unfinished, "half-written and given up")
    if one.state != "whole" or one.step is None:
        return Fate(one.name, False, one.state if one.state != "whole" else "its step is not known")
    if one.name in rules:
        return Fate(one.name, False, rules[one.name])
    if kept.every and one.step % kept.every == 0:
        return Fate(one.name, False, f"every {kept.every} steps")
    if kept.best and one.value is None:
        return Fate(one.name, False, "its metric is not known")
    if not (kept.last or kept.every or kept.best):
        return Fate(one.name, False, "no rule was given")
    return Fate(one.name, True, "no rule keeps it")


def _step(one: Candidate) -> int:
    return one.step or 0
