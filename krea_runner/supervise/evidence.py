"""What would die with the processes, copied to RUN_DIR/incidents/<attempt>/ before anything is killed."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from krea_runner.model import Finding, Snapshot
from krea_runner.rundir import RunDir


def keep_evidence(snapshot: Snapshot, finding: Finding) -> Path | None:
    """Write evidence.json beside the run; None when that is not possible. The incident's row has the summary already,
    so a full disk must not stop the restart."""
    if snapshot.attempt is None:
        return None
    if snapshot.run.config.files == "sftp":  # not ours to write to; the incident's row has it all in short
        return None
    folder = RunDir(snapshot.run.config.run_dir).incident(snapshot.attempt.key)
    document = {
        "schema_version": 1,
        "attempt": str(snapshot.attempt.key),
        "noticed_at": snapshot.wall_at,
        "finding": asdict(finding),
        "job": None if snapshot.job is None else asdict(snapshot.job),
        "heartbeats": asdict(snapshot.heartbeats),
        "watch": None if snapshot.watch is None else asdict(snapshot.watch),
        "checkpoints": asdict(snapshot.checkpoints),
        "batch_log_tail": snapshot.log.tail,
    }
    path = folder / "evidence.json"
    partial = folder / f".evidence.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=1, default=str))
        partial.replace(path)
    except OSError:
        return None
    return path
