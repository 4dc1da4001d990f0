"""Xid and SXid events of a kernel log: what they are, what NVIDIA says to do, and which belong to one incident.

    NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
    nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up

A ring buffer keeps an Xid for months. A time in it is one of three: absolute (a zone in the line), local (`utc_offset_s` tells
which zone the machine keeps) or seconds since boot (`boot_at`). Where it cannot be placed, the event counts only if it is
among the last hour of the log, and says so (`is_placed`).
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

SAME_EVENT_S = 5.0  # the coalescing window of the Delta study: a fault is logged dozens of times within seconds
SAME_BURST_S = 3600.0
_WEAK = frozenset({"record_only", "retry_same_nodes", "read_recovery_action"})
MOST_TEXT = 300


@dataclass(frozen=True, slots=True)
class XidAction:
    """A row of xids.toml."""

    action: str
    """NVIDIA's immediate action, its own word: `RESET_GPU`, `RESTART_APP`, …"""
    verdict: str
    """Ours: `record_only`, `drain_reboot`, …"""
    title: str
    source: str
    snapshot: str
    """Year and month of the catalog that the row was taken from."""
    cause: str = ""
    """Of signatures.toml; empty: this line is never the reason for anything."""
    is_weak: bool = False
    """Never the cause beside a stronger one."""

    @property
    def is_fault(self) -> bool:
        return self.verdict != "record_only"


@dataclass(frozen=True, slots=True)
class XidEvent:
    node: str
    number: int
    pci: str
    """`0000:3b:00`, as the line has it but lower case, without a function."""
    action: XidAction
    text: str
    line: int
    """1-based, of the first occurrence."""
    is_sxid: bool = False
    instance: str = ""
    """MIG: `GPU-I:05 GPU-CI:00`."""
    pid: int | None = None
    at: float | None = None
    """Epoch seconds of the first occurrence."""
    uptime_s: float | None = None
    count: int = 1
    is_placed: bool = True
    """False: its time could not be compared with the incident's."""
    follows: int | None = None
    """The earlier Xid that this one cleans up after."""


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float | None = None
    uptime_s: float | None = None


_XID = re.compile(
    r"\b(S?)Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-9A-Fa-f])?"
    r"(?: (GPU-I:[0-9]+(?: GPU-CI:[0-9]+)?))?\): ([0-9]{1,6})\b([^\n]*)"
)
_PID = re.compile(r"\bpid='?([0-9]{1,9})\b")
_FOLLOWS = re.compile(r"caused by previous Xid ([0-9]{1,4})\b")
_RECOVERY = re.compile(r"\bto 0x([0-9a-f])\b")
_NOT_FATAL = re.compile(r"\bNon-?fatal\b", re.IGNORECASE)

_ISO = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2})(?:[.,]([0-9]{1,9}))?\s?(Z|[+-][0-9]{2}:?[0-9]{2})?"
)
_CTIME = re.compile(r"\[?[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}([0-9]{1,2}) ([0-9]{2}:[0-9]{2}:[0-9]{2}) ([0-9]{4})\]?")
_SYSLOG = re.compile(r"([A-Z][a-z]{2}) {1,2}([0-9]{1,2}) ([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]+)? ")
_UPTIME = re.compile(r"(?:<[0-9]{1,3}>)?\[ {0,12}([0-9]{1,10}\.[0-9]{1,9})(?:@[0-9]+)?\]")
_KMSG = re.compile(r"[0-9]{1,3},[0-9]{1,20},([0-9]{1,18}),[^;]{0,40};")
_EPOCH = re.compile(r"([0-9]{10}\.[0-9]{1,9}) ")
_MONTHS = {name: 1 + index for index, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())}


def xids_in(
    text: str,
    *,
    node: str,
    since: float | None,
    until: float | None,
    boot_at: float | None = None,
    utc_offset_s: float = 0.0,
) -> list[XidEvent]:
    """Those of one node's kernel log (dmesg in any time format, journalctl -k, /dev/kmsg, syslog) between `since` and `until`.

    Epoch seconds, both ends included; None leaves that end open. In order of the log; the same code on the same GPU within 5 s is
    one event with a count. `boot_at` (/proc/stat's btime) places lines that count from boot.
    """
    lines = text.split("\n")
    clock = _Clock(since, until, boot_at, utc_offset_s)
    last_uptime = next(
        (moment.uptime_s for line in reversed(lines) if (moment := clock.read(line)).uptime_s is not None), None
    )
    found: list[XidEvent] = []
    latest: dict[tuple[object, ...], tuple[int, _Moment]] = {}
    for number, line in enumerate(lines, 1):
        match = _XID.search(line) if "Xid (" in line else None
        if match is None:
            continue
        moment = clock.read(line)
        event = _event(match, line, node, number, moment)
        same = (event.is_sxid, event.number, event.pci, event.instance, event.action)
        index, before = latest.get(same, (-1, _Moment()))
        if not clock.holds(moment, last_uptime):
            continue
        if index >= 0 and _is_same_event(before, moment):
            found[index] = replace(found[index], count=found[index].count + 1)
        else:
            index = len(found)
            found.append(replace(event, is_placed=moment.at is not None or (since is None and until is None)))
        latest[same] = (index, moment)
    return found


def action_of(number: int, text: str = "", *, is_sxid: bool = False) -> XidAction:
    """What the table says; the line's own words (fatal or not, the recovery action of 154) decide where they are there."""
    table = _table()
    not_fatal = _NOT_FATAL.search(text) is not None
    if is_sxid:
        # A line that says neither is one of the detail lines, "Severity 1 Engine instance 30 ...".
        row = table["sxid"]["fatal" if not not_fatal and "Fatal" in text else "non_fatal"]
    else:
        row = table["xid"].get(str(number), table["unknown"])
    action, verdict, cause, title = row
    is_weak = verdict in _WEAK
    recovery = _RECOVERY.search(text) if number == 154 and not is_sxid else None
    if recovery is not None and recovery[1] in table["recovery"]:
        name, verdict = table["recovery"][recovery[1]]
        title = f"{title}: {name}"
        cause = cause if recovery[1] != "0" else ""
    elif not_fatal:
        verdict, cause = "record_only", ""
    return XidAction(action, verdict, title, str(table["source"]), str(table["snapshot"]), cause, is_weak)


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(files("krea_runner.diagnose").joinpath("xids.toml").read_text("utf-8"))


def _event(match: re.Match[str], line: str, node: str, number: int, moment: _Moment) -> XidEvent:
    is_sxid, code, rest = bool(match[1]), int(match[4]), match[5]
    pid, follows = _PID.search(rest), _FOLLOWS.search(rest)
    return XidEvent(
        node=node,
        number=code,
        pci=match[2].lower(),
        action=action_of(code, rest, is_sxid=is_sxid),
        text=line[match.start() : match.end()][:MOST_TEXT].rstrip(),
        line=number,
        is_sxid=is_sxid,
        instance=match[3] or "",
        pid=int(pid[1]) if pid else None,
        at=moment.at,
        uptime_s=moment.uptime_s,
        follows=int(follows[1]) if follows else None,
    )


def _is_same_event(before: _Moment, now: _Moment) -> bool:
    if before.uptime_s is not None and now.uptime_s is not None:
        return abs(now.uptime_s - before.uptime_s) <= SAME_EVENT_S
    if before.at is not None and now.at is not None:
        return abs(now.at - before.at) <= SAME_EVENT_S
    return before == now  # neither line has a time


@dataclass(frozen=True, slots=True)
class _Clock:
    since: float | None
    until: float | None
    boot_at: float | None
    utc_offset_s: float

    def holds(self, moment: _Moment, last_uptime: float | None) -> bool:
        if moment.at is not None:
            return (self.since is None or moment.at >= self.since) and (self.until is None or moment.at <= self.until)
        if self.since is None and self.until is None:
            return True
        if moment.uptime_s is not None and last_uptime is not None:
            return moment.uptime_s >= last_uptime - SAME_BURST_S
        return True

    def read(self, line: str) -> _Moment:
        if (kmsg := _KMSG.match(line)) is not None:
            return self._since_boot(int(kmsg[1]) / 1e6)
        if (uptime := _UPTIME.match(line)) is not None:
            return self._since_boot(float(uptime[1]))
        if (epoch := _EPOCH.match(line)) is not None:
            return _Moment(float(epoch[1]))
        if (iso := _ISO.match(line)) is not None:
            return self._iso(iso)
        if (ctime := _CTIME.match(line)) is not None:
            return _Moment(self._local(int(ctime[4]), ctime[1], int(ctime[2]), ctime[3]))
        if (syslog := _SYSLOG.match(line)) is not None:
            return _Moment(self._without_year(syslog[1], int(syslog[2]), syslog[3]))
        return _Moment()

    def _since_boot(self, uptime_s: float) -> _Moment:
        return _Moment(None if self.boot_at is None else self.boot_at + uptime_s, uptime_s)

    def _iso(self, match: re.Match[str]) -> _Moment:
        fraction = float(f"0.{match[2]}") if match[2] else 0.0
        zone = match[3]
        try:
            naive = datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return _Moment()
        offset = 0.0 if zone == "Z" else self.utc_offset_s if zone is None else _offset(zone)
        return _Moment(naive + fraction - offset)

    def _local(self, year: int, month: str, day: int, clock: str) -> float | None:
        hour, minute, second = (int(part) for part in clock.split(":"))
        try:
            moment = datetime(year, _MONTHS.get(month, 0), day, hour, minute, min(second, 59), tzinfo=UTC)
        except ValueError:
            return None
        return moment.timestamp() - self.utc_offset_s

    def _without_year(self, month: str, day: int, clock: str) -> float | None:
        """The year that puts it nearest before the incident's end: a log of December is read in January."""
        near = self.until if self.until is not None else self.since
        if near is None:
            return None
        year = datetime.fromtimestamp(near, UTC).year
        candidates = [self._local(year - back, month, day, clock) for back in (-1, 0, 1)]
        times = [time for time in candidates if time is not None]
        return min(times, key=lambda time: abs(time - near), default=None)


def _offset(zone: str) -> float:
    digits = zone[1:].replace(":", "")
    return (-1 if zone[0] == "-" else 1) * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
