"""The kernel log's word: which Xid, SXid, OOM kill or link event belongs to this attempt, and what it means."""

from dataclasses import dataclass

from krea_runner.diagnose.gather import Event, Log
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.xid import SAME_BURST_S, action_of

BEFORE_START_S = 120.0


@dataclass(slots=True)
class KernelFact:
    event: Event
    cause: str
    node: str
    device: int | None
    rank: int | None
    weak: bool = False
    text: str = ""


def facts(logs: list[Log], layout: Layout, since: float | None) -> list[KernelFact]:
    """Of this attempt, in order of time within a node. Benign codes and old entries are left out."""
    found: list[KernelFact] = []
    for log in logs:
        named = ""
        for event in log.events:
            if event.signature.name == "kernel-gpu-named":
                named = event.groups["pci"]
            if event.role == "kernel" and is_recent(event, log, since):
                fact = _fact(event, log, layout, named)
                if fact is not None:
                    found.append(fact)
    return sorted(found, key=lambda fact: (fact.weak, fact.event.order))


def is_recent(event: Event, log: Log, since: float | None) -> bool:
    """A ring buffer keeps what happened months ago. Times in seconds since boot are only compared with the log's own end."""
    if event.at is not None:
        return since is None or event.at >= since - BEFORE_START_S
    if event.uptime_s is not None and log.last_uptime_s is not None:
        return event.uptime_s >= log.last_uptime_s - SAME_BURST_S
    return True


def _fact(event: Event, log: Log, layout: Layout, named: str) -> KernelFact | None:
    cause, weak = event.signature.cause, False
    code = event.groups.get("xid") or event.groups.get("sxid")
    if code is not None:
        action = action_of(int(code), event.message, is_sxid="sxid" in event.groups)
        cause, weak = action.cause, action.is_weak
        if not cause:
            return None
    pci = event.groups.get("pci", "") or named
    node = event.node or log.node
    rank = layout.rank_of_pid(node, event.pid)
    device = layout.device_of_pci(pci) if pci else None
    if device is None and rank is not None and cause != "host_oom":
        device = layout.gpu_of(rank)
    if rank is None:
        rank = layout.rank_at(node, device)
    return KernelFact(event, cause, node, device, rank, weak)
