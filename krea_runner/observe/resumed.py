"""From which checkpoint an attempt started: what its batch script exported as KREA_RESUME_FROM."""

import json
import os
import stat
from pathlib import Path

from krea_runner.model import AttemptKey, CheckpointSpec
from krea_runner.rundir import RunDir

MOST_BYTES = 64 << 10


def resumed_step(run_dir: RunDir, attempt: AttemptKey) -> int | None:
    """None where the script does not say so: an older one, an adopted job, a start without any checkpoint."""
    for line in _start_of(run_dir.script_events(attempt)).splitlines():
        try:
            event = json.loads(line)
            if event["event"] == "attempt_start":
                step = event.get("resume_step")
                return step if type(step) is int and step >= 0 else None
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            continue
    return None


def _start_of(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.pread(descriptor, MOST_BYTES, 0).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def read_left(run_dir: RunDir) -> frozenset[str]:
    """Marks of the checkpoints that nobody resumes from any more: stepped back from, after deaths soon after loading them."""
    return frozenset(line for line in _start_of(run_dir.left_checkpoints).splitlines() if line)


def left_mark(spec: CheckpointSpec, path: Path) -> str:
    """Name and time of a checkpoint, as the batch script makes it too: one that is written again is another. Empty where it
    cannot be looked at."""
    try:
        return f"{path.name}/{int((path / spec.complete if spec.complete else path).stat().st_mtime)}"
    except OSError:
        return ""
