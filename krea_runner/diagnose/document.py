"""A verdict as the JSON document that `krea-runner diagnose --json` prints and that lies beside an incident. Fields are only
ever added."""

from datetime import UTC, datetime
from typing import Any

from krea_runner.diagnose.verdict import Evidence, Verdict


def document(verdict: Verdict) -> dict[str, Any]:
    suspects = verdict.suspects
    return {
        "schema_version": 1,
        "cause": verdict.cause,
        "policy": verdict.policy,
        "retryable": verdict.retryable,
        "title": verdict.title,
        "advice": verdict.advice,
        "symptom": verdict.symptom,
        "confidence": verdict.confidence,
        "why": verdict.why,
        "everywhere": verdict.everywhere,
        "suspects": {
            "nodes": list(suspects.nodes),
            "ranks": list(suspects.ranks),
            "gpus": list(suspects.gpus),
            "reasons": [{"kind": s.kind, "name": s.name, "reason": s.reason} for s in suspects.reasons],
        },
        "first_evidence": None if verdict.first_evidence is None else evidence_document(verdict.first_evidence),
        "evidence": [evidence_document(item) for item in verdict.evidence],
        "fallout": [evidence_document(item) for item in verdict.fallout],
        "problems": list(verdict.problems),
    }


def evidence_document(item: Evidence) -> dict[str, Any]:
    return {
        "file": item.file, "line": item.line, "text": item.text, "signature": item.signature,
        "time": None if item.at is None else log_time(item.at), "rank": item.rank, "node": item.node or None,
        "gpu": item.gpu or None, "count": item.count,
    }  # fmt: skip


def log_time(at: float) -> str:
    """As the log has it: nobody knows its zone."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")
