"""Who kept the others waiting: the Flight Recorder dumps of one job, compared.

For each process group, from its oldest call that every dump still holds: the first sequence number that some rank never
enqueued (it is behind: stalled, crashed or elsewhere), or that ranks asked for differently (code or arguments diverge), or that
all asked for alike and not all finished (network or a GPU). Only the first difference of a group counts: what follows it is
paired wrongly. A group that waits for ranks which themselves wait in another group is fallout of that other group.

A test holds it against torch.distributed.flight_recorder (2.13) on recorded and on random runs. Where that one is wrong the
answers differ on purpose: it takes the lowest rank's call for the right one (here the majority's is), it cannot read gloo's
dumps (`pg_config` has another key than the entries), it stops when one rank left no dump, and where ring buffers have lost
entries it aligns ranks by record instead of by call, which accuses those that are in fewer groups.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from krea_runner.diagnose.flight_dump import Call, DumpError, Entry, RankDump, Status, read_dump

NAMED = 8  # ranks a line has room for
MOST_FILES = 65_536
DEEP = 3  # folders below the one that is named

MISSING, MISMATCH, NOT_STARTED, NOT_FINISHED, STUCK_TOGETHER, NO_DUMP, P2P = (
    "missing_ranks",
    "mismatch",
    "not_started",
    "not_finished",
    "stuck_together",
    "no_dump",
    "p2p",
)
HEALTHY, UNDECIDED = "healthy", "undecided"

# Calls whose sizes rightly differ between ranks (torch 2.13's analyser exempts the same).
UNEQUAL_INPUTS = {"all_to_all", "all_to_all_single", "all_to_all_v_single", "scatter"}
UNEQUAL_OUTPUTS = {"all_to_all", "all_to_all_single", "all_to_all_v_single", "gather"}
_RANK = re.compile(r"([0-9]{1,7})(?:\.(?:json|pickle|pkl))?$", re.ASCII)
_PEERS = re.compile(r"(send|recv) ([0-9]{1,7})(?:->|<-)([0-9]{1,7})$", re.ASCII)


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """Over the ranks that left a dump; -1 is never."""

    group: str
    """`name:description`."""
    members: tuple[int, ...]
    lowest_enqueued: int
    highest_enqueued: int
    lowest_started: int
    lowest_completed: int
    behind: tuple[int, ...]
    """Ranks at `lowest_enqueued`, where others are further."""


@dataclass(frozen=True, slots=True)
class FlightFinding:
    kind: str
    """missing_ranks, mismatch, not_started, not_finished, stuck_together, no_dump, p2p."""
    group: str
    seq: int
    suspects: tuple[int, ...]
    reason: str
    confidence: str
    """high, medium or low."""
    mismatch: str = ""
    """Of `mismatch` and `p2p`: op, sizes or dtypes."""
    where: str = ""
    """`file:line function` at which the waiting ranks call."""
    waiting: tuple[int, ...] = ()
    since_ns: int = 0
    """Earliest creation of the call that does not finish: the ranks' own clocks."""
    is_fallout: bool = False
    """Its suspects themselves wait in another group that has a finding."""


@dataclass(frozen=True, slots=True)
class FlightRecorderVerdict:
    """`findings`: causes before fallout, then the earliest. `suspects` are those of the causes, in that order."""

    kind: str
    """The first finding's; `healthy` (every call that was made has joined and finished) or `undecided`."""
    reason: str
    confidence: str
    suspects: tuple[int, ...] = ()
    group: str = ""
    seq: int | None = None
    findings: tuple[FlightFinding, ...] = ()
    groups: tuple[GroupProgress, ...] = ()
    ranks: tuple[int, ...] = ()
    no_dump: tuple[int, ...] = ()
    versions: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Files that could not be read, and why: a line each."""


def analyse_flight_recorder(paths: Sequence[Path]) -> FlightRecorderVerdict:
    """Of the dumps in these files and folders (a rank's number ends the file's name; .json, .pkl and .pickle may follow).

    Raises `DumpError` if not one could be read. Of two files of one rank the pickle is taken, else the newer.
    """
    dumps: list[RankDump] = []
    problems: list[str] = []
    files, passed_over = _files(paths)
    for rank, path in sorted(files.items()):
        try:
            dumps.append(read_dump(path, rank))
        except DumpError as error:
            problems.append(str(error))
    if not dumps:
        why = problems[0] if problems else f"no file whose name ends in a rank ({passed_over} others)"
        raise DumpError(
            f"no flight recorder dump could be read: {why}",
            hint="Name the folder that TORCH_FR_DUMP_TEMP_FILE points into, e.g. crash/123/ for crash/123/fr_rank_0.",
        )
    return replace(analyse_dumps(dumps), problems=tuple(problems))


def analyse_dumps(dumps: Sequence[RankDump]) -> FlightRecorderVerdict:
    """Pure. `dumps` must not be empty, one a rank."""
    groups = _groups(dumps)
    findings = [finding for group in groups for finding in group.findings()]
    ordered = _causes_first(findings, groups)
    have = {dump.rank for dump in dumps}
    no_dump = tuple(sorted({rank for group in groups for rank in group.members} - have))
    causes = [finding for finding in ordered if not finding.is_fallout]
    decided = [finding for finding in causes if finding.suspects]
    if no_dump and not decided and (causes or any(group.is_waiting for group in groups)):
        # The others wait and agree: a process that could not even write its dump is the likeliest reason.
        first = causes[0] if causes else None
        reason = f"{_ranks(no_dump)} left no dump, and the ranks that did wait for something"
        missing = FlightFinding(
            NO_DUMP, first.group if first else "", first.seq if first else 0, no_dump, reason, "medium"
        )
        ordered, causes = [missing, *ordered], [missing]
    named = tuple(dict.fromkeys(rank for finding in causes for rank in finding.suspects))
    held_up = {rank for finding in causes for rank in _waiting_elsewhere(finding, ordered, groups)}
    suspects = tuple(rank for rank in named if rank not in held_up) or named
    seen = FlightRecorderVerdict(
        HEALTHY,
        "every recorded call was joined by its ranks and has finished",
        "medium" if no_dump else "high",
        groups=tuple(group.progress() for group in groups),
        ranks=tuple(sorted(have)),
        no_dump=no_dump,
        versions=tuple(sorted({dump.version for dump in dumps})),
    )
    if ordered:
        top = ordered[0]
        seen = replace(seen, kind=top.kind, reason=top.reason, confidence=top.confidence, group=top.group, seq=top.seq)
        return replace(seen, suspects=suspects, findings=tuple(ordered))
    if not groups:
        return replace(seen, kind=UNDECIDED, reason="the dumps hold no call of any process group", confidence="low")
    return seen


def _files(paths: Sequence[Path]) -> tuple[dict[int, Path], int]:
    """Rank → file, and how many files have no rank in their name."""
    chosen: dict[int, Path] = {}
    other = 0
    for path in list(_walk(paths))[:MOST_FILES]:
        match = _RANK.search(path.name)
        if match is None:
            other += 1
        elif (rank := int(match[1])) not in chosen or _rating(path) > _rating(chosen[rank]):
            chosen[rank] = path
    return chosen, other


def _rating(path: Path) -> tuple[bool, float]:
    try:
        return path.suffix != ".json", path.stat().st_mtime
    except OSError:
        return False, 0.0  # gone between listing and looking: read_dump will say so


def _walk(paths: Sequence[Path]) -> Iterable[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, below, names in os.walk(path):
            if len(Path(folder).relative_to(path).parts) >= DEEP:
                below.clear()
            below.sort()
            # The trigger FIFOs of live ranks end in .pipe, and are no regular files.
            yield from (file for name in sorted(names) if (file := Path(folder, name)).is_file())


@dataclass(slots=True)
class _Group:
    name: str
    members: tuple[int, ...]
    calls: dict[int, dict[int, list[Entry]]]
    """Rank → sequence number → its entries there (several in a coalesced call). Every member that left a dump is in it."""
    p2p: dict[int, list[Entry]]
    status: dict[int, Status]
    whole: set[int]
    """Ranks whose ring buffer has lost nothing."""
    is_listed: bool = True
    """Otherwise `members` are only those that were seen to call it."""

    def enqueued(self, rank: int) -> int:
        return max((*self.calls[rank], self.status[rank].enqueued))

    def is_done(self, rank: int, seq: int) -> bool:
        return self.status[rank].completed >= seq or all(entry.done for entry in self.calls[rank][seq])

    @property
    def is_waiting(self) -> bool:
        return any(self.blocked(rank) for rank in self.calls)

    def blocked(self, rank: int) -> bool:
        return any(not self.is_done(rank, seq) for seq in self.calls[rank]) or any(
            not entry.done for entry in self.p2p[rank]
        )

    def progress(self) -> GroupProgress:
        enqueued = {rank: self.enqueued(rank) for rank in self.calls}
        low, high = min(enqueued.values()), max(enqueued.values())
        started = [self._furthest(rank, lambda entry: entry.started, self.status[rank].started) for rank in self.calls]
        done = [self._furthest(rank, lambda entry: entry.done, self.status[rank].completed) for rank in self.calls]
        behind = tuple(sorted(rank for rank, seq in enqueued.items() if seq == low)) if low < high else ()
        return GroupProgress(self.name, self.members, low, high, min(started), min(done), behind)

    def _furthest(self, rank: int, holds: Callable[[Entry], bool], status: int) -> int:
        seqs = [seq for seq, entries in self.calls[rank].items() if all(holds(entry) for entry in entries)]
        return max(status, *seqs, -1)

    def findings(self) -> list[FlightFinding]:
        found = self._first_difference() or self._unfinished()
        return found or self._unpaired()

    def _first_difference(self) -> list[FlightFinding]:
        held = [min(seqs) for rank, seqs in self.calls.items() if seqs and rank not in self.whole]
        base = max(held, default=0)
        for seq in sorted({seq for seqs in self.calls.values() for seq in seqs if seq >= base}):
            present = {rank: [entry.call for entry in seqs[seq]] for rank, seqs in self.calls.items() if seq in seqs}
            absent = tuple(sorted(rank for rank in self.calls if rank not in present and self.enqueued(rank) < seq))
            found = []
            if absent:
                found.append(self._missing(seq, absent, present))
            if (differing := _differing(present, len(self.members))) is not None:
                found.append(self._mismatch(seq, differing, present))
            if found:
                return found
        return []

    def _finding(
        self, kind: str, seq: int, suspects: tuple[int, ...], why: str, sure: str, mismatch: str = ""
    ) -> FlightFinding:
        at = {rank: seqs[seq] for rank, seqs in self.calls.items() if seq in seqs}
        waiting = tuple(sorted(rank for rank in at if rank not in suspects and not self.is_done(rank, seq)))
        spoken = next((at[rank][0].where for rank in waiting or sorted(at)), "")
        since = min((entry.created_ns for entries in at.values() for entry in entries), default=0)
        return FlightFinding(kind, self.name, seq, suspects, why, sure, mismatch, spoken, waiting, since)

    def _missing(self, seq: int, absent: tuple[int, ...], present: dict[int, list[Call]]) -> FlightFinding:
        usual = Counter(call[0].op for call in present.values()).most_common(1)[0][0]
        waits = any(not self.is_done(rank, seq) for rank in present)
        reason = f"{_ranks(absent)} never entered {usual} {seq} of group {self.name}; {_ranks(present)} did"
        # Where the others have finished it, they may only have been dumped a moment later.
        known = all(rank in self.whole or self.calls[rank] or self.status[rank].enqueued >= 0 for rank in absent)
        return self._finding(MISSING, seq, absent, reason, "high" if waits and known and self.is_listed else "medium")

    def _mismatch(
        self, seq: int, differing: tuple[str, tuple[int, ...]], present: dict[int, list[Call]]
    ) -> FlightFinding:
        what, odd = differing
        agreeing = [rank for rank in sorted(present) if rank not in odd]
        if not agreeing:
            reason = (
                f"the sizes of all ranks together do not add up in {_said(present[odd[0]])} {seq} of group {self.name}"
            )
            return self._finding(MISMATCH, seq, (), reason, "medium", what)
        usual, other = present[agreeing[0]], present[odd[0]]
        reason = (
            f"{_ranks(odd)} called {_said(other)} where {_ranks(agreeing)} called {_said(usual)}: "
            f"{what} of call {seq} of group {self.name} differ"
        )
        # With a tie, nobody can say which half is wrong.
        return self._finding(MISMATCH, seq, odd, reason, "high" if len(odd) < len(agreeing) else "medium", what)

    def _unfinished(self) -> list[FlightFinding]:
        waiting = {
            rank: min(seq for seq in seqs if not self.is_done(rank, seq))
            for rank, seqs in self.calls.items()
            if any(not self.is_done(rank, seq) for seq in seqs)
        }
        if not waiting:
            return []
        seq = min(waiting.values())
        at = {rank: seqs[seq] for rank, seqs in self.calls.items() if seq in seqs}
        stuck = tuple(sorted(rank for rank, first in waiting.items() if first == seq))
        started = {rank for rank in at if self.is_done(rank, seq) or all(entry.started for entry in at[rank])}
        said = f"{_said([entry.call for entry in at[stuck[0]]])} {seq} of group {self.name}"
        behind = tuple(rank for rank in stuck if rank not in started)
        if behind and started:
            reason = f"{_ranks(behind)} enqueued {said} but the GPU never started it; on {_ranks(started)} it runs or is done"
            return [self._finding(NOT_STARTED, seq, behind, reason, "medium")]
        if len(stuck) < len(at):
            reason = f"{_ranks(stuck)} did not finish {said}; {_ranks(set(at) - set(stuck))} did"
            return [self._finding(NOT_FINISHED, seq, stuck, reason, "low")]
        if not self.is_listed:
            reason = (
                f"{_ranks(stuck)} did not finish {said}; the recorder does not name its members, so one may be missing"
            )
            return [self._finding(STUCK_TOGETHER, seq, (), reason, "low")]
        reason = f"all ranks entered {said} alike and none finished it: network, a GPU, or a rank without a dump"
        return [self._finding(STUCK_TOGETHER, seq, (), reason, "medium")]

    def _unpaired(self) -> list[FlightFinding]:
        """Sends and receives that do not finish, whose peer (it left a dump) has no call for them or one of another size."""
        found = []
        for rank, entries in sorted(self.p2p.items()):
            entry = next((entry for entry in entries if not entry.done and _PEERS.search(entry.call.op)), None)
            peer = self._peer(entry.call.op) if entry is not None else None
            if entry is None or peer is None or peer not in self.p2p:
                continue
            twin = next(
                (other for other in self.p2p[peer] if not other.done and _are_twins(entry.call.op, other.call.op)), None
            )
            if twin is not None and _volume(twin.call) == _volume(entry.call):
                continue
            what = "" if twin is None else "sizes"
            said = f"{entry.call.op} (ranks of group {self.name})"
            reason = (
                f"rank {rank} waits in {said}, rank {peer} never called its side"
                if twin is None
                else f"rank {rank} called {said} of {_volume(entry.call)} elements, rank {peer} of {_volume(twin.call)}"
            )
            suspects = (peer,) if twin is None else tuple(sorted((rank, peer)))
            found.append(
                FlightFinding(
                    P2P, self.name, entry.seq, suspects, reason, "medium", what, entry.where, (rank,), entry.created_ns
                )
            )
        return found[:1] if found and found[0].mismatch else found

    def _peer(self, op: str) -> int | None:
        """Ranks in a name count within the group."""
        match = _PEERS.search(op)
        index = int(match[3]) if match else -1
        return self.members[index] if 0 <= index < len(self.members) else None


def _groups(dumps: Sequence[RankDump]) -> list[_Group]:
    keyed: dict[tuple[str, str, tuple[int, ...]], _Group] = {}
    ids: dict[tuple[str, str], str] = {}
    used: dict[tuple[str, str], set[int]] = {}
    for dump in dumps:
        for entry in dump.entries:
            used.setdefault(entry.group, set()).add(dump.rank)
            ids.setdefault(entry.group, entry.group_id)
    by_rank = {dump.rank: dump for dump in dumps}
    for dump in dumps:
        for name in dict.fromkeys(entry.group for entry in dump.entries):
            named = _members(dump, name)
            # gloo (torch 2.13) names no members once there is a second group; everybody is in the default one.
            members = named or tuple(sorted(by_rank if name[1] == "default_pg" else used[name]))
            key = (*name, members)
            if key not in keyed:
                have = [rank for rank in members if rank in by_rank]
                keyed[key] = _group(name, members, [by_rank[rank] for rank in have], ids[name])
                keyed[key].is_listed = bool(named) or name[1] == "default_pg"
    return [group for group in keyed.values() if group.calls]


def _members(dump: RankDump, name: tuple[str, str]) -> tuple[int, ...]:
    if name[0] in dump.members:
        return dump.members[name[0]]
    # gloo, torch 2.13: the default group is configured under the empty name while its entries say "0".
    return dump.members.get("", ()) if name[1] in {"default_pg", ""} else ()


def _group(name: tuple[str, str], members: tuple[int, ...], dumps: Sequence[RankDump], group_id: str) -> _Group:
    label = f"{name[0]}:{name[1]}" if name[1] not in {"", "undefined"} else name[0]
    group = _Group(label, members, {}, {}, {}, set())
    for dump in dumps:
        mine = [entry for entry in dump.entries if entry.group == name]
        calls: dict[int, list[Entry]] = {}
        for entry in mine:
            if not entry.is_p2p and entry.seq > 0:
                calls.setdefault(entry.seq, []).append(entry)
        group.calls[dump.rank] = calls
        group.p2p[dump.rank] = [entry for entry in mine if entry.is_p2p]
        group.status[dump.rank] = dump.status.get(mine[0].group_id if mine else group_id, Status())
        if not dump.entries or dump.entries[0].record_id == 0:
            group.whole.add(dump.rank)
    return group


def _differing(present: dict[int, list[Call]], size: int) -> tuple[str, tuple[int, ...]] | None:
    """What differs first, and the ranks outside the majority (of a tie: without the lowest rank)."""
    for what, aspect in _ASPECTS.items():
        said = {rank: tuple(aspect(call) for call in calls) for rank, calls in sorted(present.items())}
        ranked = Counter(said.values()).most_common()
        if len(ranked) > 1:
            return what, tuple(rank for rank in said if said[rank] != ranked[0][0])
    first = next(iter(present.values()))[0]
    if first.op == "all_to_all" and len(present) == size:
        ins = sum(_elements(calls[0].input_sizes) for calls in present.values())
        outs = sum(_elements(calls[0].output_sizes) for calls in present.values())
        if ins != outs:
            return "sizes", tuple(sorted(present))
    return None


_ASPECTS: dict[str, Callable[[Call], object]] = {
    "op": lambda call: call.op,
    "sizes": lambda call: (
        None if call.op in UNEQUAL_INPUTS else call.input_sizes,
        None if call.op in UNEQUAL_OUTPUTS else call.output_sizes,
    ),
    "dtypes": lambda call: (
        None if call.op in {"scatter", "broadcast"} or not _elements(call.input_sizes) else call.input_dtypes,
        None if call.op == "gather" or not _elements(call.output_sizes) else call.output_dtypes,
    ),
}


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(tensor) for tensor in sizes)


def _volume(call: Call) -> int:
    return _elements(call.input_sizes if call.op.startswith("send") else call.output_sizes)


def _are_twins(one: str, other: str) -> bool:
    """`send 0->1` and `recv 1<-0`."""
    mine, yours = _PEERS.search(one), _PEERS.search(other)
    return bool(mine and yours and mine[1] != yours[1] and (mine[2], mine[3]) == (yours[3], yours[2]))


def _causes_first(findings: Sequence[FlightFinding], groups: Sequence[_Group]) -> list[FlightFinding]:
    marked = []
    for finding in findings:
        waiting = _waiting_elsewhere(finding, findings, groups)
        marked.append(replace(finding, is_fallout=bool(finding.suspects) and waiting == set(finding.suspects)))
    if marked and all(finding.is_fallout for finding in marked):  # a ring of groups, each waiting for the next
        marked = [replace(finding, is_fallout=False) for finding in marked]
    vague = {STUCK_TOGETHER}
    return sorted(marked, key=lambda finding: (finding.is_fallout, finding.kind in vague, finding.since_ns))


def _waiting_elsewhere(finding: FlightFinding, findings: Sequence[FlightFinding], groups: Sequence[_Group]) -> set[int]:
    """The suspects that have not come because they themselves wait in another group: for whom, its own finding says."""
    by_name = {group.name: group for group in groups}
    return {
        rank
        for other in findings
        if other.group != finding.group
        for rank in {*finding.suspects}.intersection(other.waiting)
        if by_name[other.group].blocked(rank)
    }


def _said(calls: Sequence[Call]) -> str:
    first = calls[0]
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    sizes = ", ".join(str(list(size)) for size in first.input_sizes[:2])
    return f"{first.op}({sizes}{', …' if len(first.input_sizes) > 2 else ''} {'/'.join(sorted(set(first.input_dtypes)))}){more}"


def _ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    named = ", ".join(str(rank) for rank in ordered[:NAMED])
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return f"rank{'s' if len(ordered) > 1 else ''} {named}{more}"
