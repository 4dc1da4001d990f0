"""One log → its events: lines that a signature knows, with who, where and when; and where progress was last seen."""

import re
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import islice

from krea_runner.diagnose.layout import Layout, bus_key
from krea_runner.diagnose.lines import LogLine, any_time, clean, read_line
from krea_runner.diagnose.reading import Block, LogUnreadable, Part, blocks
from krea_runner.diagnose.scan import CAP, Search
from krea_runner.diagnose.signatures import Catalog, Signature, match
from krea_runner.diagnose.xid import SAME_EVENT_S

TAIL_BYTES = 1 << 20
HEAD_BYTES = 64 << 10
SAME_LIMIT = 64  # events kept of one signature, rank and attempt; the rest is counted
_PROGRESS = re.compile(
    r"\b(?:step|iteration|iter|it|global_step)\b[ =:#]{0,12}\d+|\d{1,3}%\||\{'loss': |completed step: \d+"
    r"|\b[Ee]poch\b.{0,40}\bloss\b|\bloss[ =:]+\d.{0,80}(?:it/s|s/it|tok/s|samples/s)|saved checkpoint"
)
SURVIVED_BY = 3  # steps after an event: the run went on
_WRITER = re.compile(r" {0,6}\d{1,6}: |\[rank\d+\]:")
TRACEBACKS = 200  # of one log, followed line by line
_MARGIN = re.compile(rb" {0,6}(?:\d{1,6}: )?(?:\[rank\d+\]: )?")
_NAMED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w+(?:: |$)(?P<message>.*)")
_USUAL = re.compile(r"[\w.]+(?:Error|Exception|Abort|Interrupt|Exit|Failure|Timeout|NotFound|Exceeded)\b")
_LOCAL_GID = re.compile(r"local ?G[iI][dD] (?!index)([0-9a-f:.]+)")
_NO_FAILURE = frozenset({"context", "start", "restart", "end"})
_NUMBERS = frozenset({"rank", "rank2", "pid", "pid2", "xid", "sxid", "code", "seq", "grank", "nranks"})
_TASKS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(slots=True)
class Event:
    signature: Signature
    groups: dict[str, str]
    log: int
    """Number of the log among those read: kernel logs come last."""
    line: int
    text: str
    message: str
    order: tuple[float, int, int]
    at: float | None = None
    uptime_s: float | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    """Of an srun line, which names several."""
    node: str = ""
    device: int | None = None
    pid: int | None = None
    group: str = ""
    group_rank: int | None = None
    mild: bool = False
    count: int = 1

    @property
    def role(self) -> str:
        return self.signature.role

    @property
    def all_ranks(self) -> set[int]:
        return set(self.ranks) | ({self.rank} if self.rank is not None else set())


@dataclass(slots=True)
class Log:
    name: str
    node: str = ""
    """Of a kernel log; of a log per node, where that is known."""
    kernel: bool = False
    events: list[Event] = field(default_factory=list)
    progress: list[tuple[int, str, str]] = field(default_factory=list)
    """Near the end of the log, after the first sign of a failure, ascending: line, the rank it names (as text, or none), the step
    as it was printed."""
    first_at: float | None = None
    last_uptime_s: float | None = None
    bytes_read: int = 0
    is_cut_short: bool = False
    """It was not read to its end: there was no time."""
    problem: str = ""
    """Why the rest of it could not be read."""

    def progress_after(self, line: int) -> int:
        """How many steps one and the same rank shows after that line, at most SURVIVED_BY: four ranks that print step 10 while a
        fifth prints its exception are no progress."""
        steps: dict[str, set[str]] = {}
        most = 0
        for number, rank, step in reversed(self.progress):
            if number <= line or most >= SURVIVED_BY:
                break
            steps.setdefault(rank, set()).add(step)
            most = max(most, len(steps[rank]))
        return most


def read_log(
    source: str | Part,
    number: int,
    catalog: Catalog,
    layout: Layout,
    *,
    node: str = "",
    kernel: bool = False,
    is_late: Callable[[], bool] = lambda: False,
) -> Log:
    """`is_late` is asked after each block: once it says so, the rest is left unread. Raises LogUnreadable where not one byte
    could be read."""
    log = Log(source.name if isinstance(source, Part) else source, node, kernel)
    search, reader = Search(catalog.literals), _Reader(catalog, layout, log, number)
    tail: deque[Block] = deque()
    for block in _readable(source, log):
        if log.bytes_read and is_late():
            log.is_cut_short = True
            break
        if not log.bytes_read:
            reader.look_at_head(block.data[:HEAD_BYTES])
        log.bytes_read += len(block.data)
        tail.append(block)
        while len(tail) > 1 and sum(len(kept.data) for kept in tail) - len(tail[0].data) >= TAIL_BYTES:
            tail.popleft()
        reader.take(block, search)
    if max(search.seen, default=0) >= CAP:  # what ended the job may be the twenty-thousand-and-first of its kind
        known = {event.line for event in log.events}
        for block in tail:
            reader.take(block, Search(catalog.literals), known)
        log.events.sort(key=lambda event: event.line)
    _look_at_tail(log, tail)
    return log


def _readable(source: str | Part, log: Log) -> Iterator[Block]:
    """A compressed log that ends in the middle is what a crash leaves: what could be unpacked is judged."""
    try:
        yield from blocks(source)
    except LogUnreadable as error:
        if not log.bytes_read:
            raise
        log.problem = str(error)


class _Reader:
    def __init__(self, catalog: Catalog, layout: Layout, log: Log, number: int) -> None:
        self.catalog, self.layout, self.log, self.number = catalog, layout, log, number
        self.year, self.carried, self.followed = 1970, 0.0, 0
        self.kept: dict[tuple[str, object, str], Event] = {}
        self.counts: dict[tuple[str, object], int] = {}
        self.bursts: dict[tuple[str, ...], deque[Event]] = {}
        self.latest: dict[tuple[str, ...], Event] = {}

    def look_at_head(self, head: bytes) -> None:
        for raw in head.split(b"\n"):
            if (at := any_time(clean(raw))) is not None:
                self.log.first_at, self.carried = at, at
                self.year = int(1970 + at // 31556952)
                return

    def take(self, block: Block, search: Search, known: Container[int] = ()) -> None:
        data, line, position = block.data, block.first_line, 0
        for start, end, literals in search.lines(data):
            line += data.count(b"\n", position, start)
            position = start
            if line in known:
                continue
            candidates = sorted({index for literal in literals for index in self.catalog.by_literal[literal]})
            self._line(data, start, end, line, candidates)

    def _line(self, data: bytes, start: int, end: int, number: int, candidates: list[int]) -> None:
        line = read_line(data[start:end], self.year)
        found = match(self.catalog, candidates, line.message)
        if found is None and line.label is not None:  # srun -l splits a partial line and gives its rest a new label
            joined = _with_start(data, start, line)
            if joined is not None:
                line = read_line(joined, self.year)
                found = match(self.catalog, candidates, line.message)
                kept = self.log.events[-1:]
                if found is not None and kept and kept[0].role == "exception" and line.text.startswith(kept[0].text):
                    self.log.events.pop()  # what its first half alone looked like
        if found is None:
            return
        if line.at is not None:
            self.carried = line.at
        if found[0].name == "traceback":
            if self.followed < TRACEBACKS:
                self.followed += 1
                self._follow(data, end, number)
            return
        self._keep(found[0], found[1], line, number)

    def _follow(self, data: bytes, end: int, number: int) -> None:
        """From a traceback's first line to the exception, where its name has none of the usual endings."""
        begin = data.rfind(b"\n", 0, end) + 1
        margin = _MARGIN.match(data, begin, end)
        prefix = margin[0] if margin else b""
        for raw in data[end + 1 : end + 16384].split(b"\n"):
            number += 1
            if not raw.startswith(prefix):
                continue
            rest = raw[len(prefix) :]
            if rest[:1] in {b" ", b"\t", b""} or rest[:1] == b"+":
                continue
            line = read_line(raw, self.year)
            found = _NAMED.match(line.message)
            if found and not _USUAL.match(line.message):
                signature = self.catalog.signatures[-1]
                self._keep(signature, found, line, number)
            return

    def _keep(self, signature: Signature, found: re.Match[str], line: LogLine, number: int) -> None:
        groups = {
            key: value for key, value in found.groupdict().items()
            if value is not None and (key not in _NUMBERS or value.lstrip("-").isdecimal())
        }  # fmt: skip
        event = Event(
            signature, groups, self.number, number, line.text, line.message,
            order=(line.at if line.at is not None else self.carried, self.number, number),
            at=line.at, uptime_s=line.uptime_s, rank=line.rank, device=line.device, pid=line.pid,
            group=line.group, group_rank=line.group_rank, mild=line.mild,
        )  # fmt: skip
        if line.uptime_s is not None:
            self.log.last_uptime_s = line.uptime_s
        locate(event, line, self.layout, self.log)
        learn(event, self.layout)
        if signature.role == "kernel":
            self._keep_kernel(event)
            return
        who = (signature.name, event.rank if event.rank is not None else (event.node, line.label))
        same = self.kept.get((*who, event.message[:160]))
        if same is not None and not same.groups.keys() & {"seq"} and signature.role not in {"start", "context"}:
            same.count += 1
            return
        self.counts[who] = self.counts.get(who, 0) + 1
        if self.counts[who] > SAME_LIMIT and signature.role not in {"start", "restart", "end", "scheduler"}:
            if same is not None:
                same.count += 1
            return
        self.kept[(*who, event.message[:160])] = event
        self.log.events.append(event)
        if signature.role in {"start", "restart"}:  # a new attempt: the same message is a new event
            self.kept.clear()
            self.counts.clear()

    def _keep_kernel(self, event: Event) -> None:
        """The same fault within seconds is one event. Of each fault the newest are kept: a ring buffer may be full of what
        happened long before."""
        code = event.groups.get("xid") or event.groups.get("sxid")
        what = (event.groups.get("pci") or event.groups.get("switch", ""),) if code else (event.message[:160],)
        key = (event.signature.name, code or "", *what)
        before, burst = self.latest.get(key), self.bursts.setdefault(key, deque())
        self.latest[key] = event
        if before is not None and _is_same_moment(before, event):
            burst[-1].count += 1
            return
        burst.append(event)
        self.log.events.append(event)
        if len(burst) > SAME_LIMIT:
            self.log.events.remove(burst.popleft())


def _is_same_moment(before: Event, now: Event) -> bool:
    for one, other in ((before.uptime_s, now.uptime_s), (before.at, now.at)):
        if one is not None and other is not None:
            return abs(other - one) <= SAME_EVENT_S
    return {before.at, now.at, before.uptime_s, now.uptime_s} == {None}


def _with_start(data: bytes, start: int, line: LogLine) -> bytes | None:
    """The line joined to the nearest earlier line of the same label, if that is near."""
    label, end = f"{line.label}:", start - 1
    for _ in range(24):
        if end <= 0:
            return None
        begin = data.rfind(b"\n", 0, end) + 1
        head = data[begin:end]
        if head[:16].lstrip().startswith(label.encode()):
            rest = line.text.lstrip()[len(label) :].removeprefix(" ")
            return None if len(head) < 8 else head + rest.encode()
        end = begin - 1
    return None


def locate(event: Event, line: LogLine, layout: Layout, log: Log) -> None:
    """Fill in rank, node and device from what the line itself says."""
    groups = event.groups
    event.node = layout.short(line.node) or (log.node if log.kernel or not line.node else line.node)
    if "tasks" in groups:
        event.node = layout.short(groups.get("node", "")) or groups.get("node", "")
        if layout.launcher == "srun":
            event.ranks = tuple(_tasks(groups["tasks"]))
        return
    if event.rank is None and ("rank" in groups or "rank2" in groups):
        event.rank = int(groups.get("rank") or groups["rank2"])
    if (
        event.rank is None
        and line.label is not None
        and layout.launcher != "torchrun"
        and (layout.launcher or line.label)
    ):
        event.rank = line.label
    if event.rank is None and line.pid is not None:
        event.rank = layout.pid_ranks.get((event.node, line.pid))
    if event.rank is None and event.node:
        event.rank = layout.rank_at(event.node, line.device)
    if event.rank is None and line.group_rank is not None and not line.group:
        event.rank = line.group_rank  # torch <= 2.1 prints no global rank; the default group is all there mostly is
    if "node" in groups:
        event.node = layout.short(groups["node"]) or groups["node"]
    if not event.node:
        event.node = layout.node_of(event.rank)
    if not event.node and line.label is not None and layout.launcher == "torchrun" and line.label < len(layout.nodes):
        event.node = layout.nodes[line.label]
    if event.device is None and groups.get("gpu", "").isdigit():
        event.device = int(groups["gpu"])
    if "pid" in groups or "pid2" in groups:
        event.pid = int(groups.get("pid") or groups["pid2"])


def _tasks(text: str) -> Iterator[int]:
    for found in _TASKS.finditer(text[:2000]):
        first = int(found[1])
        yield from range(first, min(int(found[2] or first), first + 100_000) + 1)


def learn(event: Event, layout: Layout) -> None:
    """What NCCL prints at start-up tells the layout."""
    if event.pid is not None and event.device is not None and event.node and event.role != "kernel":
        layout.first_pids.setdefault(event.node, set()).add(event.pid - event.device)
    if event.role == "fabric" and event.node and (gid := _LOCAL_GID.search(event.text)):
        layout.addresses.setdefault(gid[1].removeprefix("::ffff:"), event.node)
    if event.signature.name == "nccl-address" and event.node:
        layout.addresses.setdefault(event.groups["ip"], event.node)
    if event.signature.name == "nccl-rank" and event.device is not None:
        layout.bus_devices.setdefault(bus_key(event.groups["bus"]), event.device)
        if int(event.groups["nranks"]) >= layout.world_size and not layout.known:
            layout.world_size = int(event.groups["nranks"])
            layout.rank_nodes[int(event.groups["grank"])] = event.node
        if event.pid is not None:
            rank = int(event.groups["grank"]) if int(event.groups["nranks"]) == layout.world_size else event.rank
            if rank is not None:
                layout.pid_ranks.setdefault((event.node, event.pid), rank)
                layout.pid_ranks.setdefault(("", event.pid), rank)
    elif event.pid is not None and event.rank is not None and event.signature.role != "kernel":
        layout.pid_ranks.setdefault(("", event.pid), event.rank)


def _look_at_tail(log: Log, tail: deque[Block]) -> None:
    if log.kernel:
        return
    known = {event.line for event in log.events}
    # What the run did before the first sign of a failure, and a log without any, need not be looked at line by line.
    begin = min((event.line for event in log.events if event.role not in _NO_FAILURE), default=None)
    for block in tail if begin is not None else ():
        data = block.data
        lines = data.split(b"\n")
        if block.first_line + len(lines) <= (begin or 0):
            continue
        for number, raw in enumerate(lines, block.first_line):
            if number < (begin or 0) or number in known or len(raw) < 4:
                continue
            text = raw[:8192].decode("utf-8", "replace")
            for place, found in enumerate(islice(_PROGRESS.finditer(text), 8)):
                step = found[0] if found[0][-1].isdigit() else f"{number}.{place}"
                log.progress.append((number, rank[0] if (rank := _WRITER.match(text)) else "", step))
