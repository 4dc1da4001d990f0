"""What would die with the processes, copied to RUN_DIR/incidents/<attempt>/ before anything is killed.

Where the run directory is on another host it is written there, over SFTP: everything about a run is in one place. Only when
that fails it is kept in this host's copy of the directory (transport/mirror.py), below the state directory.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from krea_runner.errors import FilesUnavailable
from krea_runner.model import AttemptKey, Finding, RunConfig, Snapshot
from krea_runner.observe.answered import answered
from krea_runner.rundir import RunDir
from krea_runner.transport.mirror import local_copy, put_files


def evidence_document(snapshot: Snapshot, finding: Finding) -> dict[str, Any]:
    assert snapshot.attempt is not None  # noqa: S101 - an incident is always an attempt's
    return {
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


def write_evidence(
    config: RunConfig, key: AttemptKey, document: dict[str, Any] | None, more: Mapping[str, str] = MappingProxyType({})
) -> Path | None:
    """evidence.json (with None it is left as it is), and `more` files beside it by name; None when that is not possible: the
    incident's row has what counts, so a full disk must not stop the restart."""
    folder = RunDir(config.run_dir).incident(key)
    texts = dict(more) if document is None else {"evidence.json": json.dumps(document, indent=1, default=str), **more}
    if config.files == "sftp":
        try:
            put_files(config, [folder], {folder / name: text.encode() for name, text in texts.items()})
            return folder / "evidence.json"
        except FilesUnavailable:  # the connection is what fails first, often for the reason that the run did
            folder = local_copy(config).incident(key)
    try:
        answered(config, config.run_dir, lambda: _write(folder, texts))
    except (OSError, FilesUnavailable):
        return None
    return folder / "evidence.json"


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(text)
        partial.replace(folder / name)
