"""The kernel log's word: which Xid, SXid, OOM kill or link event belongs to this attempt, and what it means."""

from dataclasses import dataclass

from krea_runner.diagnose.gather import Event, Log
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.signatures import Catalog

BEFORE_START_S = 120.0
SAME_BURST_S = 3600.0  # a log in seconds since boot is only compared with its own end
WEAK_XIDS = {13, 31, 63, 137, 154}
"""An application's own fault, a repair that worked, a follower, a recommendation: never the cause beside a stronger one."""


@dataclass(slots=True)
class KernelFact:
    event: Event
    cause: str
    node: str
    device: int | None
    rank: int | None
    weak: bool = False
    text: str = ""


def facts(logs: list[Log], layout: Layout, catalog: Catalog, since: float | None) -> list[KernelFact]:
    """Of this attempt, in order of time within a node. Benign codes and old entries are left out."""
    found: list[KernelFact] = []
    for log in logs:
        named = ""
        for event in log.events:
            if event.signature.name == "kernel-gpu-named":
                named = event.groups["pci"]
            if event.role == "kernel" and is_recent(event, log, since):
                fact = _fact(event, log, layout, catalog, named)
                if fact is not None:
                    found.append(fact)
    return sorted(found, key=lambda fact: (fact.weak, fact.event.order))


def is_recent(event: Event, log: Log, since: float | None) -> bool:
    if event.at is not None:
        return since is None or event.at >= since - BEFORE_START_S
    if event.uptime_s is not None and log.last_uptime_s is not None:
        return event.uptime_s >= log.last_uptime_s - SAME_BURST_S
    return True


def _fact(event: Event, log: Log, layout: Layout, catalog: Catalog, named: str) -> KernelFact | None:
    cause, weak = event.signature.cause, False
    if "xid" in event.groups:
        number = int(event.groups["xid"])
        if number not in catalog.xids or "Nonfatal" in event.message or "Non-fatal" in event.message:
            return None
        if number == 154 and "to 0x0" in event.message:
            return None
        cause, weak = catalog.xids[number][0], number in WEAK_XIDS
    pci = event.groups.get("pci", "") or named
    node = event.node or log.node
    rank = layout.rank_of_pid(node, event.pid)
    device = layout.device_of_pci(pci) if pci else None
    if device is None and rank is not None and cause != "host_oom":
        device = layout.gpu_of(rank)
    if rank is None:
        rank = layout.rank_at(node, device)
    return KernelFact(event, cause, node, device, rank, weak)
