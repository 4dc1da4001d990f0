"""Who is to blame in a collective's time-out: seldom the rank that reports it first.

In order: a group that timed out first makes the later ones fallout; different operations at one sequence number are a
desync; ranks of the group that report nothing; the lowest last-enqueued work. Else nobody can be named from the log."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from krea_runner.diagnose.gather import Event
from krea_runner.diagnose.layout import Layout

SILENT_SHARE = 0.26  # more silent ranks than this are lost log lines or ranks killed before they could report


@dataclass(slots=True)
class Waiting:
    """One rank's report of one collective."""

    rank: int
    group_rank: int | None
    event: Event
    enqueued: int | None = None


@dataclass(slots=True)
class Collective:
    sequence: int
    group: str
    reports: dict[int, Waiting] = field(default_factory=dict)
    operations: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @property
    def first(self) -> Event:
        return min((report.event for report in self.reports.values()), key=lambda event: event.order)


@dataclass(frozen=True, slots=True)
class Blame:
    first: Event
    ranks: tuple[int, ...]
    reason: str
    desync: bool = False


def analyse(timeouts: list[Event], statuses: list[Event], layout: Layout) -> Blame:
    """`timeouts` is not empty."""
    groups = _collectives(timeouts, statuses)
    if not groups:
        return Blame(min(timeouts, key=lambda event: event.order), (), "no rank can be told from the log")
    first = min(groups, key=lambda group: group.first.order)
    desync = _odd_ones(first)
    if desync is not None:
        return Blame(
            first.first, desync, f"another operation at sequence number {first.sequence} than the others", desync=True
        )
    members = _members(first, layout)
    silent = sorted(members - set(first.reports))
    if silent and _is_plausible(silent, members, layout):
        return Blame(
            first.first,
            tuple(silent),
            f"did not report the time-out of collective {first.sequence}: it never got there, or is stuck",
        )
    late = _lagging(first)
    if late:
        return Blame(
            first.first, late, f"enqueued less than the others when collective {first.sequence} timed out: it came late"
        )
    return Blame(
        first.first, (), "every rank reports the same collective: GPU, network or lost lines; no rank can be named"
    )


def _collectives(timeouts: list[Event], statuses: list[Event]) -> list[Collective]:
    group_of: dict[tuple[int, str], Event] = {}
    for told in statuses:
        if told.rank is not None and told.group:
            group_of.setdefault((told.rank, told.groups["seq"]), told)
    found: dict[tuple[str, int], Collective] = {}
    for event in timeouts:
        if event.rank is None or "seq" not in event.groups:
            continue
        status = group_of.get((event.rank, event.groups["seq"]))
        name = status.group if status is not None else event.group
        sequence = int(event.groups["seq"])
        collective = found.setdefault((name, sequence), Collective(sequence, name))
        if event.rank in collective.reports:
            continue
        group_rank = event.group_rank if event.group_rank is not None else None if status is None else status.group_rank
        report = Waiting(event.rank, group_rank, event)
        if status is not None:
            report.enqueued = int(status.groups["enqueued"])
        collective.reports[event.rank] = report
        operation = (event.groups.get("op", ""), event.groups.get("numin", ""), event.groups.get("numout", ""))
        collective.operations[operation] += 1
    return list(found.values())


def _odd_ones(group: Collective) -> tuple[int, ...] | None:
    if len(group.operations) < 2:
        return None
    usual, count = group.operations.most_common(1)[0]
    if count * 2 <= len(group.reports):
        return tuple(sorted(group.reports))
    return tuple(
        sorted(
            rank for rank, report in group.reports.items()
            if tuple(report.event.groups.get(key, "") for key in ("op", "numin", "numout")) != usual
        )
    )  # fmt: skip


def _members(group: Collective, layout: Layout) -> set[int]:
    """The ranks of the process group, from the group ranks in the lines and the size that the element counts give away."""
    pairs = sorted((r.group_rank, rank) for rank, r in group.reports.items() if r.group_rank is not None)
    if not pairs or all(local == rank for local, rank in pairs):
        whole = set(range(layout.world_size))
        size = _size(group)
        return set(range(size)) if size and size < len(whole) else whole or set(group.reports)
    steps = {(b[1] - a[1]) // (b[0] - a[0]) for a, b in pairwise(pairs) if b[0] != a[0]}
    if len(steps) != 1 or (step := steps.pop()) <= 0:
        return set(group.reports)
    base = pairs[0][1] - pairs[0][0] * step
    size = _size(group) or max(local for local, _ in pairs) + 1
    return {rank for rank in range(base, base + size * step, step) if not layout.world_size or rank < layout.world_size}


def _size(group: Collective) -> int:
    """An all-gather's output is its input times the group's size, a reduce-scatter the other way round."""
    for (operation, numel_in, numel_out), _ in group.operations.most_common(1):
        small, large = sorted((int(numel_in or 0), int(numel_out or 0)))
        if small and large > small and large % small == 0 and operation not in {"ALLREDUCE", "BROADCAST"}:
            return large // small
    return 0


def _is_plausible(silent: list[int], members: set[int], layout: Layout) -> bool:
    if len(silent) <= max(1, int(len(members) * SILENT_SHARE)):
        return True
    nodes = {layout.node_of(rank) for rank in silent}
    return len(nodes) == 1 and len(layout.nodes) > 2 and set(silent) == set(layout.ranks_on(nodes.pop()))


def _lagging(group: Collective) -> tuple[int, ...]:
    known = {rank: r.enqueued for rank, r in group.reports.items() if r.enqueued is not None}
    if not known or len(set(known.values())) < 2:
        return ()
    lowest = min(known.values())
    late = tuple(sorted(rank for rank, enqueued in known.items() if enqueued == lowest))
    return late if len(late) * 2 < len(known) else ()
