"""What would die with the processes, copied to RUN_DIR/incidents/<attempt>/ before anything is killed.

Where the run directory is on another host it is written there, over SFTP: everything about a run is in one place. Only when
that fails it is kept in this host's copy of the directory (transport/mirror.py), below the state directory.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from krea_runner.errors import FilesUnavailable
from krea_runner.model import Finding, Snapshot
from krea_runner.rundir import RunDir
from krea_runner.transport.mirror import local_copy, put_files


def keep_evidence(snapshot: Snapshot, finding: Finding) -> Path | None:
    """Write evidence.json beside the run; None when that is not possible. The incident's row has the summary already,
    so a full disk must not stop the restart."""
    if snapshot.attempt is None:
        return None
    config = snapshot.run.config
    folder = RunDir(config.run_dir).incident(snapshot.attempt.key)
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
    text = json.dumps(document, indent=1, default=str)
    if config.files == "sftp":
        try:
            put_files(config, [folder], {folder / "evidence.json": text.encode()})
            return folder / "evidence.json"
        except FilesUnavailable:  # the connection is what fails first, often for the reason that the run did
            folder = local_copy(config).incident(snapshot.attempt.key)
    return _write(folder / "evidence.json", text)


def _write(path: Path, text: str) -> Path | None:
    partial = path.with_name(f".evidence.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        return None
    return path
