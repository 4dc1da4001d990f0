"""The sources of progress besides our heartbeats: what each shows at one look, and the watcher's memory of them.

Whoever could not be seen says so; it has neither moved nor stood still then. Nothing is inferred from a time on a file:
that it changed is a sign, how old it is is none.
"""

import os
import re
import stat
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from krea_runner.config.progress_presets import compiled
from krea_runner.model import (
    BEAT_FILES,
    CHECKPOINTS,
    LOG_PATTERN,
    AttemptKey,
    CheckpointReading,
    CheckpointSpec,
    FollowedLog,
    ProgressSpec,
    SourceReading,
    SourceWatch,
    Watch,
)
from krea_runner.observe.follow import Log, follow
from krea_runner.rundir import RunDir

READ_FILES = 1024  # of more .beat files only the times and sizes are looked at
READ_BYTES = 4096
_STEP = re.compile(rb"\s*(\d{1,18})(?!\d)")


def read_beat_files(folder: Path) -> SourceReading | None:
    """heartbeats/<attempt>/*.beat: a change of content, size or time of any of them is a beat. An integer that a file begins
    with is its step. None where there are no such files."""
    marks: list[tuple[str, int, int, int]] = []
    steps: list[int] = []
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".beat"))
    except FileNotFoundError:
        return None
    except OSError as error:
        return SourceReading(BEAT_FILES, unseen=f"could not list {folder}: {error.strerror}")
    if not names:
        return None
    unseen = ""
    for number, name in enumerate(names):
        try:
            status, data = _read_beat(f"{folder}/{name}", content=number < READ_FILES)
        except OSError as error:
            unseen = unseen or f"{name}: {error.strerror or error}"
            continue
        marks.append((name, status.st_size, status.st_mtime_ns, zlib.crc32(data)))
        match = _STEP.match(data)
        steps += [int(match[1])] if match else []
    if not marks:
        return SourceReading(BEAT_FILES, unseen=unseen)
    mark = f"{zlib.crc32(repr(marks).encode('utf-8', 'surrogateescape')):08x}"
    return SourceReading(BEAT_FILES, mark=mark, step=max(steps, default=None), unseen=unseen)


def _read_beat(path: str, *, content: bool) -> tuple[os.stat_result, bytes]:
    if not content:
        return os.stat(path, follow_symlinks=False), b""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        return status, os.pread(descriptor, READ_BYTES, 0)
    finally:
        os.close(descriptor)


def read_sources(
    run_dir: RunDir,
    attempt: AttemptKey,
    spec: ProgressSpec,
    checkpoints: tuple[CheckpointSpec, CheckpointReading],
    job_log: Path | None,
    memory: Watch | None,
) -> tuple[tuple[SourceReading, ...], tuple[FollowedLog, ...]]:
    """One reading for each source that this run has. `memory` is of this attempt, or None."""
    readings: list[SourceReading] = []
    followed: tuple[FollowedLog, ...] = ()
    beats = read_beat_files(run_dir.heartbeats(attempt))
    readings += [beats] if beats else []
    if spec.pattern:
        known = {log.name: log for log in memory.followed} if memory else {}
        logs, problem = _logs(run_dir, attempt, job_log)
        if problem:
            readings.append(SourceReading(LOG_PATTERN, unseen=problem))
            followed = tuple(known.values())
        else:
            reading, followed = follow(LOG_PATTERN, logs, known, _compiled(spec.pattern))
            readings.append(reading)
    where, found = checkpoints
    if where.directory is not None:
        newest = found.newest.step if found.newest else None
        mark = f"{newest} {' '.join(found.incomplete)}"[:200]
        readings.append(SourceReading(CHECKPOINTS, mark=mark, step=newest, unseen="".join(found.problems[:1])))
    return tuple(readings), followed


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return compiled(pattern)


def _logs(run_dir: RunDir, attempt: AttemptKey, job_log: Path | None) -> tuple[list[Log], str]:
    """The attempt's logs, and why they could not be listed. A log that all attempts share is whole for the first of them."""
    first = attempt.restart_count == 0 and attempt.relaunch == 0
    if job_log is not None:
        return ([] if job_log == Path(os.devnull) else [Log(str(job_log), job_log.name, is_whole=first)]), ""
    folder = run_dir.attempt_logs(attempt)
    try:
        with os.scandir(folder) as entries:
            own = [Log(one.path, one.name, is_whole=True) for one in entries if one.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        own = []
    except OSError as error:
        return [], f"could not list {folder}: {error.strerror}"
    batch = run_dir.batch_log(attempt.job_id)
    return [Log(str(batch), batch.name, is_whole=first), *own], ""


def advance_sources(
    old: Sequence[SourceWatch], readings: Sequence[SourceReading], mono: float, unwatched_s: float = 0.0
) -> tuple[SourceWatch, ...]:
    """The memory after one more look. A source that was there before and has nothing to show now could not be seen. Time in which
    nobody looked (`unwatched_s`), and time in which it could not be seen, is not time in which it stood still."""
    known = {source.name: source for source in old}
    shown = {reading.name: reading for reading in readings}
    lost = [SourceReading(name, unseen="nothing of it is left") for name in known if name not in shown]
    return tuple(_advance(known.get(reading.name), reading, mono, unwatched_s) for reading in [*readings, *lost])


def _advance(old: SourceWatch | None, reading: SourceReading, mono: float, unwatched_s: float) -> SourceWatch:
    first = old is None
    old = old or SourceWatch(reading.name)
    since = old.unseen_since_mono
    blind_s = unwatched_s if since is None else max(unwatched_s, mono - since)
    moved_mono = old.moved_mono
    if reading.unseen:
        old = replace(old, unseen=reading.unseen, unseen_since_mono=mono if since is None else since)
    else:
        old = replace(old, unseen="", unseen_since_mono=None)
        moved_mono = None if moved_mono is None else min(mono, moved_mono + blind_s)
    # The checkpoints that are there at first are those of earlier attempts.
    changed = reading.mark not in {"", old.mark} and not (first and reading.name == CHECKPOINTS)
    return replace(
        old,
        mark=reading.mark or old.mark,
        step=reading.step if reading.step is not None else old.step,
        moved_mono=mono if reading.moved or changed else moved_mono,
    )
