"""Follows logs by offset and looks for their last progress line. Whatever the logs hold, one look reads LOOK_BYTES and
takes LOOK_S at most: of a backlog only the end is read, because the newest line is the one that counts.
"""

import os
import re
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import NamedTuple

from krea_runner.model import FollowedLog, SourceReading

LOOK_BYTES = 8 << 20
FILE_BYTES = 2 << 20
LEAST_FILE_BYTES = 4 << 10
LINE_CHARS = 2000
LOOK_S = 1.0
# CSI sequences: torchtitan and rich colour the words that an expression has to find next to each other.
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_BREAK = re.compile(r"[\r\n]")


class TooSlow(Exception):
    """The expression did not come to an end in time."""


class Log(NamedTuple):
    path: str
    name: str
    is_whole: bool
    """It holds this attempt and nothing else: what is in it at the first look is news. Of any other log only what comes after."""


@contextmanager
def time_cap(seconds: float) -> Iterator[None]:
    """Raises TooSlow within, once this process has computed for `seconds`: CPython's `re` looks for signals while it backtracks
    (3.11 to 3.14). Waiting for a file system is not counted. Outside the main thread, where no signal arrives, there is no cap.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended: list[bool] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        if not ended:
            raise TooSlow

    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        try:
            yield
        finally:
            ended.append(True)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


class Due(NamedTuple):
    """A log with something new in it: as it was when it was last read, and as it is."""

    path: str
    log: FollowedLog
    inode: int
    size_bytes: int


class Found(NamedTuple):
    log: FollowedLog
    moved: bool
    step: int | None
    skipped: bool
    """No progress line was found, and not all that is new was read."""


def follow(
    name: str, logs: list[Log], known: Mapping[str, FollowedLog], pattern: re.Pattern[str]
) -> tuple[SourceReading, tuple[FollowedLog, ...]]:
    """What the logs say of progress since `known` was returned. What could not be read makes the source unseen, unless another
    log shows progress; a log that is not there yet says nothing."""
    followed = dict(known)
    due, problems = _due(logs, followed)
    for gone in known.keys() - {log.name for log in logs}:
        followed[gone] = _gone(followed[gone])
        problems.append(f"{gone} is gone")
    shown = sum(bool(item.log.mark) for item in due)
    rooms = {True: _room(shown), False: _room(len(due) - shown)}
    moved, steps = False, []
    try:
        with time_cap(LOOK_S):
            for item in sorted(due, key=lambda item: not item.log.mark):
                try:
                    found = _read_on(item, rooms[bool(item.log.mark)], pattern)
                except OSError as error:
                    problems.append(f"{item.log.name}: {error.strerror or error}")
                    continue
                followed[item.log.name] = found.log
                moved = moved or found.moved
                steps += [] if found.step is None else [found.step]
                if found.skipped and (item.log.mark or not shown):
                    problems.append(f"{item.log.name} grew faster than it is read, and its end shows no progress")
    except TooSlow:
        problems.insert(0, f"the pattern takes more than {LOOK_S:g} s for the new lines: make it simpler")
    reading = SourceReading(name, moved, step=max(steps, default=None), unseen="" if moved else "".join(problems[:1]))
    return reading, tuple(followed.values())


def _due(logs: list[Log], followed: dict[str, FollowedLog]) -> tuple[list[Due], list[str]]:
    """The logs to read on, and what could not be looked at. Those that begin to be followed at their end are put there."""
    due, problems = [], []
    for path, name, is_whole in logs:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if name in followed:
                followed[name] = _gone(followed[name])
                problems.append(f"{name} is gone")
            continue
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        size, old = status.st_size, followed.get(name)
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{name}: not a regular file")
        elif old is None and not is_whole:
            followed[name] = FollowedLog(name, status.st_ino, size, size)
        elif old is None or old.inode != status.st_ino or size < old.size_bytes:  # new, rotated or truncated
            due.append(Due(path, FollowedLog(name, status.st_ino, 0, 0, old.mark if old else ""), status.st_ino, size))
        elif size != old.size_bytes:
            due.append(Due(path, old, status.st_ino, size))
    return due, problems


def _gone(log: FollowedLog) -> FollowedLog:
    """Another may take its name, and even its inode."""
    return replace(log, inode=0, size_bytes=0, offset=0)


def _room(count: int) -> int:
    return max(LEAST_FILE_BYTES, min(FILE_BYTES, LOOK_BYTES // 2 // max(1, count)))


def _read_on(item: Due, room: int, pattern: re.Pattern[str]) -> Found:
    log, size = item.log, item.size_bytes
    start = max(log.offset, size - room)
    descriptor = os.open(item.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, size - start, start)
    finally:
        os.close(descriptor)
    rest = len(data) - 1 - max(data.rfind(b"\n"), data.rfind(b"\r"))
    if rest > LINE_CHARS:  # the end of this line is not in sight
        rest = 0
    log = FollowedLog(log.name, item.inode, size, start + len(data) - rest, log.mark)
    *lines, unfinished = _BREAK.split(data.replace(b"\0", b"").decode(errors="replace"))
    match = _match(pattern, unfinished)
    if not _mark(match):  # it may go on: before its end only what it names counts
        match = next((found for line in reversed(lines) if (found := _match(pattern, line))), None)
    mark = _mark(match)
    if match is None or (mark and mark == log.mark):
        return Found(log, False, None, skipped=match is None and start > item.log.offset)
    step = match.groupdict().get("step") or ""
    number = int(step) if step.isascii() and step.isdigit() and len(step) < 19 else None
    return Found(replace(log, mark=mark or log.mark), True, number, skipped=False)


def _match(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    line = line[:LINE_CHARS]
    return pattern.search(_COLOUR.sub("", line) if "\x1b" in line else line)


def _mark(match: re.Match[str] | None) -> str:
    """What must change for the next such line to be progress; empty: each new line is."""
    groups = match.groupdict() if match else {}
    return (groups.get("step") or groups.get("mark") or "")[:64]
