"""Who may act on a run. The lease itself is a row of the history; here is who we are and whether another is still alive."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from krea_runner.history.store import History, Lease

# Longer than the slowest tick can act: each Slurm command is cut at 20 s.
LEASE_S = 120.0


def own_holder() -> str:
    """`host:pid:start`; the start time tells this process from a later one with the same pid."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def take_leases(history: History, run_ids: Iterable[int], holder: str, now: float) -> dict[int, Lease]:
    """By run; one that a living supervisor holds is not among them. The lease of one that died on this host is taken over at
    once."""
    wanted, until = set(run_ids), now + LEASE_S
    taken = history.take_leases(wanted, holder, now=now, until=until)
    for run_id in wanted - set(taken):
        other = history.lease_holder(run_id)
        if other is not None and _is_dead_here(other):
            taken |= history.take_leases([run_id], holder, now=now, until=until, dead=other)
    return taken


def _is_dead_here(holder: str) -> bool:
    host, _, process = holder.partition(":")
    pid, _, started = process.partition(":")
    return host == socket.gethostname() and pid.isdigit() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat); empty when there is no such process, `Z` included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
