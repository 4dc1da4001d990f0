"""The attempt's logs: do they grow, what does the batch script say, how did it end. Bounded reads; text is made harmless."""

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

from krea_runner.model import AttemptKey, LogReading, ScriptEnd
from krea_runner.rundir import RunDir

TAIL_BYTES = 64 * 1024
# All but printable text: also line separators, marks that turn the direction of a line, and lone surrogates.
_CONTROL = re.compile(r"[^\t\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")
_MARKER = "krea_runner: attempt "


def printable(text: str) -> str:
    """`text` without terminal escapes and other control characters."""
    return _CONTROL.sub("?", text)


def attempt_marker(attempt: AttemptKey) -> str:
    """The line with which the batch script begins an attempt in the log that all attempts of a job share."""
    return f"{_MARKER}{attempt} "


def read_logs(run_dir: RunDir, attempt: AttemptKey, job_log: Path | None = None) -> LogReading:
    """A log that is not there yet has size 0: nobody has written. `job_log`: the only log, of an adopted job."""
    if job_log is not None:
        return _read_job_log(job_log, attempt)
    batch = run_dir.batch_log(attempt.job_id)
    try:
        size = sum(entry.stat().st_size for entry in _files(run_dir.attempt_logs(attempt)))
        batch_size, tail = _tail(batch)
    except OSError as error:
        return LogReading(problems=(f"could not read the logs of {attempt}: {error.strerror} ({error.filename!r})",))
    return LogReading(size_bytes=size + batch_size, tail=printable(_part_of(attempt, tail)))


def attempt_bytes(path: Path, attempt: AttemptKey, most_bytes: int) -> tuple[int, int, int | None]:
    """Begin, end, and number of the first line, of the attempt's part of a log that all attempts of a job share. Looked for in
    its last `most_bytes`: where that is not all of it, lines are not numbered (None). Begin is end where nothing is there.

    Raises: OSError.
    """
    size, data = _tail_bytes(path, most_bytes)
    text, skipped = data.decode("latin-1"), max(0, size - most_bytes)
    begin, end = _bounds(attempt, text)
    return skipped + begin, skipped + end, None if skipped else text.count("\n", 0, begin) + 1


def _read_job_log(path: Path, attempt: AttemptKey) -> LogReading:
    """Without our script nothing marks where an attempt begins: a later one's tail may hold what killed an earlier one, so it
    is left out rather than blamed on the wrong rank."""
    if path == Path(os.devnull):
        return LogReading()
    try:
        size, tail = _tail(path)
    except OSError as error:
        return LogReading(problems=(f"could not read {path}: {error.strerror}",))
    return LogReading(size_bytes=size, tail="" if attempt.restart_count else printable(tail))


def read_script_end(run_dir: RunDir, attempt: AttemptKey) -> ScriptEnd | None:
    """None until the batch script has written its last word; also when that cannot be read: Slurm's answer is used."""
    try:
        _, text = _tail(run_dir.script_events(attempt))
    except OSError:
        return None
    for line in reversed(text.splitlines()):
        try:
            event = json.loads(line)
            if event["event"] == "attempt_end" and 0 <= int(event["exit_code"]) < 256:
                warned = event.get("warned") is True
                return ScriptEnd(exit_code=int(event["exit_code"]), at=float(event["at"]), warned=warned)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # a torn line: the script was killed while writing it
    return None


def _part_of(attempt: AttemptKey, text: str) -> str:
    begin, end = _bounds(attempt, text)
    return text[begin:end]


def _bounds(attempt: AttemptKey, text: str) -> tuple[int, int]:
    """From the attempt's marker to the next attempt's. Where no script of ours leaves markers, and where the attempt's own lies
    further back than we read, all that is in sight before the next attempt's."""
    start = text.rfind(attempt_marker(attempt))
    if start < 0:
        following = text.find(_MARKER)
        if following < 0:
            return 0, len(text)
        following_is_next = text.startswith(
            attempt_marker(replace(attempt, restart_count=attempt.restart_count + 1)), following
        )
        return 0, following if following_is_next else 0
    end = text.find(f"\n{_MARKER}", start)
    return start, len(text) if end < 0 else end + 1


def _files(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _tail(path: Path) -> tuple[int, str]:
    size, data = _tail_bytes(path, TAIL_BYTES)
    return size, data.decode(errors="replace")


def _tail_bytes(path: Path, most_bytes: int) -> tuple[int, bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO in its place must not block us
    except FileNotFoundError:
        return 0, b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file", str(path))
        size = status.st_size
        data = os.pread(descriptor, most_bytes, max(0, size - most_bytes))
    finally:
        os.close(descriptor)
    return size, data
