"""What Flight Recorder dumps and an NCCL RAS report add to a verdict from the logs.

They show who was missing in a collective, which a log shows only in part. They decide where the log has nothing better than a
hang; a fault that names itself (an Xid, an exception, Slurm's word) stays the cause, and the dump is told beside it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from krea_runner.diagnose.flight_recorder import FlightRecorderVerdict, analyse_flight_recorder
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.signatures import Cause
from krea_runner.diagnose.verdict import Suspects, Verdict
from krea_runner.model import Suspect

HANGS = frozenset("nccl_timeout nccl_watchdog_stuck collective_desync unknown_failure healthy_running".split())


def with_flight_recorder(verdict: Verdict, folder: Path, causes: Mapping[str, Cause]) -> Verdict:
    """Raises DumpError if no dump could be read."""
    found = analyse_flight_recorder([folder])
    if verdict.cause not in HANGS or not _decides(found, verdict):
        return replace(verdict, why=f"{verdict.why}; flight recorder: {found.reason}")
    cause = causes["collective_desync" if found.kind == "mismatch" else "nccl_timeout"]
    if verdict.cause == "nccl_watchdog_stuck" and cause.name == "nccl_timeout":
        cause = causes[verdict.cause]
    return replace(
        verdict,
        cause=cause.name,
        policy=cause.policy,
        title=cause.title,
        advice=cause.advice,
        symptom="hang",
        confidence=found.confidence,
        why=f"flight recorder: {found.reason}",
        suspects=_ranks(found.suspects, found.reason),
    )


def _decides(found: FlightRecorderVerdict, verdict: Verdict) -> bool:
    """Dumps are also written by a run that goes on; without a difference they accuse nobody."""
    return bool(found.suspects) or (found.kind == "stuck_together" and verdict.cause != "healthy_running")


def _ranks(ranks: tuple[int, ...], reason: str) -> Suspects:
    return Suspects(
        ranks=tuple(sorted(ranks)), reasons=tuple(Suspect("rank", str(rank), reason) for rank in sorted(ranks)[:8])
    )


def with_ras(verdict: Verdict, text: str, layout: Layout) -> Verdict:
    """Raises RasError on anything that is no report."""
    from krea_runner.diagnose.nccl_ras import analyse_ras

    found = analyse_ras(text)
    told = replace(verdict, why=f"{verdict.why}; NCCL RAS: {found.reason}")
    if found.healthy or verdict.cause not in HANGS - {"healthy_running"} or verdict.suspects.ranks:
        return told
    whole = any(item.suspects and item.size in {0, layout.world_size} for item in found.findings[:1])
    nodes = tuple(sorted({node for host in found.suspect_hosts if (node := layout.short(host))}))
    if not whole and not nodes:
        return told
    named = _ranks(found.suspect_ranks if whole else (), found.reason)
    return replace(told, suspects=replace(named, nodes=nodes), confidence=found.confidence)
