"""The attempt's logs: do they grow, what does the batch script say, how did it end. Bounded reads; text is made harmless."""

import json
import os
import re
from pathlib import Path

from krea_runner.model import AttemptKey, LogReading, ScriptEnd
from krea_runner.rundir import RunDir

TAIL_BYTES = 64 * 1024
_CONTROL = re.compile(r"[^\t\n\x20-\x7e\xa0-\U0010ffff]")


def printable(text: str) -> str:
    """`text` without terminal escapes and other control characters."""
    return _CONTROL.sub("?", text)


def attempt_marker(attempt: AttemptKey) -> str:
    """The line with which the batch script begins an attempt in the log that all attempts of a job share."""
    return f"krea_runner: attempt {attempt} "


def read_logs(run_dir: RunDir, attempt: AttemptKey) -> LogReading:
    """A log that is not there yet has size 0: nobody has written."""
    batch = run_dir.batch_log(attempt.job_id)
    try:
        size = sum(entry.stat().st_size for entry in _files(run_dir.attempt_logs(attempt)))
        batch_size, tail = _tail(batch)
    except OSError as error:
        return LogReading(problems=(f"could not read the logs of {attempt}: {error.strerror} ({error.filename})",))
    start = tail.rfind(attempt_marker(attempt))
    return LogReading(size_bytes=size + batch_size, tail=printable(tail[start:] if start >= 0 else ""))


def read_script_end(run_dir: RunDir, attempt: AttemptKey) -> ScriptEnd | None:
    """None until the batch script has written its last word; also when that cannot be read: Slurm's answer is used."""
    try:
        _, text = _tail(run_dir.script_events(attempt))
    except OSError:
        return None
    for line in reversed(text.splitlines()):
        try:
            event = json.loads(line)
            if event["event"] == "attempt_end":
                return ScriptEnd(exit_code=int(event["exit_code"]), at=float(event["at"]))
        except (ValueError, KeyError, TypeError):
            continue  # a torn line: the script was killed while writing it
    return None


def _files(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _tail(path: Path) -> tuple[int, str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO in its place must not block us
    except FileNotFoundError:
        return 0, ""
    try:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
    finally:
        os.close(descriptor)
    return size, data.decode(errors="replace")
