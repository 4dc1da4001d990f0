"""Slurm's folded node lists: `n[01-04,7],m1` ⇄ names. Order and form are those of `scontrol show hostnames` and `scontrol
show hostlist` (22.05.8 to 26.05): nothing is sorted, nothing is made unique. Something after the last bracket, `n[1-2]x`, is
refused by 22.05 and read by 24.11, and so here."""

import itertools
import re
from collections.abc import Iterable, Sequence

from krea_runner.errors import KreaRunnerError

MAX_RANGE = 65536  # as Slurm: MAX_RANGE of hostlist.c


class NodelistError(KreaRunnerError):
    """Not a node list, as Slurm sees it: a bracket without its other half, a range that runs backwards, ..."""

    exit_code = 2


def expand(nodelist: str) -> list[str]:
    """Names in Slurm's order; empty for an empty list.

    Raises: NodelistError.
    """
    groups = re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", nodelist)
    return [name for group in groups for name in _expand_group(group, nodelist)]


def fold(names: Iterable[str]) -> str:
    """The shortest form that Slurm gives to these names in this order; neighbours alone are folded."""
    parts: list[str] = []
    for (prefix, bare), group in itertools.groupby(names, key=_prefix):
        numbers = [name.removeprefix(prefix) for name in group]
        if bare or len(numbers) == 1:
            parts += [prefix + number for number in numbers]
        else:
            parts.append(f"{prefix}[{','.join(_ranges(numbers))}]")
    return ",".join(parts)


def _prefix(name: str) -> tuple[str, bool]:
    """What stands before the number, and whether there is none."""
    prefix = name.rstrip("0123456789")
    return prefix, prefix == name


def _expand_group(group: str, whole: str) -> list[str]:
    pieces = re.split(r"\[([^\[\]]*)\]", group)
    if len(pieces) == 1:
        if "[" in group or "]" in group:
            raise NodelistError(f"node list {whole[:200]!r}: a bracket without its other half")
        return [group]
    *fixed, suffix = pieces[::2]
    if any("[" in text or "]" in text for text in (*fixed, suffix)):
        raise NodelistError(f"node list {whole[:200]!r}: a bracket without its other half")
    choices = [_numbers(text, whole) for text in pieces[1::2]]
    # Of several brackets the last runs fastest; of those before it, the first does (22.05.8).
    *outer, last = choices
    combinations = (tuple(reversed(chosen)) for chosen in itertools.product(*reversed(outer)))
    return [
        "".join(itertools.chain.from_iterable(zip(fixed, (*chosen, number), strict=True))) + suffix
        for chosen in combinations
        for number in last
    ]


def _numbers(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not low <= high < low + MAX_RANGE:
            raise NodelistError(f"node list {whole[:200]!r}: {part[:40]!r} is no range", hint="e.g. n[01-04,7]")
        found += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return found


def _ranges(numbers: Sequence[str]) -> list[str]:
    """`["01", "02", "7"]` → `["01-02", "7"]`: a range goes on while counting with its width gives the next."""
    ranges: list[list[str]] = []
    for number in numbers:
        if ranges and number == str(int(ranges[-1][-1]) + 1).zfill(len(ranges[-1][-1])):
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ["-".join(ends) for ends in ranges]
