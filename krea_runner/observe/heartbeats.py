"""Reads heartbeats/<attempt>/: one file a node, one slot a local rank (heartbeat.py writes them).

Files are opened afresh, read once and bounded; a slot that is torn, empty, foreign or of another attempt never becomes
a record. What could not be read is said, one line a file or slot.
"""

import errno
import math
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from krea_runner.heartbeat import FORMAT, MAX_LOCAL_RANKS, SLOT
from krea_runner.model import HeartbeatReading, RankBeat

_FIELDS = (
    rb"%s rank=(\d{1,9}) local=(\d{1,4}) attempt=([!-~]{1,64}) beat=(\d{1,18}) flush=(\d{1,18}) step=(-1|\d{1,18}) "
    rb"phase=([!-~]{1,24}) budget=(-|[0-9.e+-]{1,16}) pid=(\d{1,10}) at=(\d{1,12}\.\d{3}) *" % FORMAT.encode()
)
_LINE = re.compile(_FIELDS)
_WHOLE = re.compile(_FIELDS + rb" crc=([0-9a-f]{8})\n")
_NODE = re.compile(r"[A-Za-z0-9._+\[\]-]{1,64}\.hb")  # what the writer makes of a node's name
_CRC_AT = SLOT - 14
_TORN = "torn, or not a heartbeat"
_USUAL_BYTES = 16 * SLOT
# Of each folder that this process looked at: what its files held, and the ranks that were read from it.
_SEEN: dict[tuple[str, str], dict[str, tuple[bytes, list[RankBeat]]]] = {}
KEPT_FOLDERS = 64
AT_ONCE = 256


def read_heartbeats(directory: Path, attempt: str) -> HeartbeatReading:
    """Ranks in order. A directory that is not there yet is an empty reading: nobody has started to beat."""
    ranks: dict[int, RankBeat] = {}
    problems: list[str] = []
    folder = os.fspath(directory)
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".hb"))
    except FileNotFoundError:
        return HeartbeatReading()
    except OSError as error:
        return HeartbeatReading(problems=(f"could not list heartbeats in {directory}: {error.strerror}",))
    before = _SEEN.pop((folder, attempt), {})
    seen = _SEEN[folder, attempt] = {}
    if len(_SEEN) > KEPT_FOLDERS:
        del _SEEN[next(iter(_SEEN))]
    changed: list[tuple[str, bytes]] = []
    for name in names:
        if not _NODE.fullmatch(name):
            problems.append(f"{_shown(name)}: not named after a node")
            continue
        try:
            data = _read(f"{folder}/{name}")
        except OSError as error:
            problems.append(f"{_shown(name)}: {error.strerror or error}")
            continue
        known = before.get(name)
        if known is None or known[0] != data:
            changed.append((name, data))
        else:
            seen[name] = known
            problems += _take(ranks, known[1], name)
    for start in range(0, len(changed), AT_ONCE):
        some = changed[start : start + AT_ONCE]
        beats = _parse_whole(some, attempt)
        for name, data in some:
            if beats is None:
                problems += _take_amiss(ranks, f"{folder}/{name}", data, attempt)
            else:
                seen[name] = data, beats[: len(data) // SLOT]
                del beats[: len(data) // SLOT]
                problems += _take(ranks, seen[name][1], name)
    return HeartbeatReading(ranks=tuple(ranks[rank] for rank in sorted(ranks)), problems=tuple(problems))


def _take_amiss(ranks: dict[int, RankBeat], path: str, data: bytes, attempt: str) -> list[str]:
    """Slot by slot, for something is amiss in this file or in one that was read together with it."""
    name = os.path.basename(path)
    parsed = _parse_slots(data, name[:-3], attempt)
    if _TORN in parsed:  # caught in the middle of a write: the next look finds it whole
        try:
            parsed = _parse_slots(_read(path), name[:-3], attempt)
        except OSError as error:
            return [f"{_shown(name)}: {error.strerror or error}"]
    return _take(ranks, parsed, name)


def _take(ranks: dict[int, RankBeat], parsed: Sequence[RankBeat | str | None], name: str) -> list[str]:
    """Add to `ranks` what is in a file's slots; returns what is wrong with them."""
    problems = []
    for slot, beat in enumerate(parsed):
        if isinstance(beat, str):
            problems.append(f"{_shown(name)} slot {slot}: {beat}")
        elif beat is not None:
            other = ranks.setdefault(beat.rank, beat)
            if other is not beat:
                problems.append(f"{_shown(name)} slot {slot}: rank {beat.rank} is in another slot too")
                if other.flush < beat.flush:
                    ranks[beat.rank] = beat
    return problems


def _read(path: str) -> bytes:
    # A FIFO or a link put in a file's place must not block or lead astray; of what can be opened so, only files have offsets.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, _USUAL_BYTES, 0)
        if len(data) == _USUAL_BYTES:
            data = os.pread(descriptor, SLOT * MAX_LOCAL_RANKS, 0)
        return data
    except OSError as error:
        if error.errno == errno.ESPIPE:
            raise OSError(0, "not a regular file") from None
        raise
    finally:
        os.close(descriptor)


def _parse_whole(files: Sequence[tuple[str, bytes]], attempt: str) -> list[RankBeat] | None:
    """All slots of (name, content), in order, column by column: a quarter of the time that `_parse` takes. None where anything
    is amiss in any of them."""
    data = b"".join(content for _, content in files)
    found = _WHOLE.findall(data)
    starts = range(0, len(data), SLOT)
    if not found or len(found) != len(starts) or len(data) % SLOT:
        return None
    rank, local, theirs, beat, flush, step, phase, budget, pid, at, crc = zip(*found, strict=True)
    slots = [slot for _, content in files for slot in range(len(content) // SLOT)]
    nodes = [name[:-3] for name, content in files for _ in range(len(content) // SLOT)]
    budgets = {text: None if text == b"-" else _budget(text) for text in set(budget)}
    words = {text: text.decode() for text in set(phase)}
    if (
        [zlib.crc32(data[start : start + _CRC_AT]) for start in starts] != [int(text, 16) for text in crc]
        or set(theirs) != {attempt.encode()}
        or list(map(int, local)) != slots
        or 0 in budgets.values()
    ):
        return None
    return list(
        map(
            RankBeat,
            map(int, rank), slots, nodes, map(int, beat), map(int, flush), map(int, step),
            map(words.__getitem__, phase), map(budgets.__getitem__, budget), map(int, pid), map(float, at),
        )
    )  # fmt: skip


def _budget(text: bytes) -> float | None:
    """0 where it is no length of time."""
    if text == b"-":
        return None
    try:
        seconds = float(text)
    except ValueError:
        return 0
    return seconds if 0 < seconds < math.inf else 0


def _parse_slots(data: bytes, node: str, attempt: str) -> list[RankBeat | str | None]:
    """One entry a slot, in order."""
    return [_parse(data[start : start + SLOT], node, start // SLOT, attempt) for start in range(0, len(data), SLOT)]


def _parse(line: bytes, node: str, slot: int, attempt: str) -> RankBeat | str | None:
    """The record, None for a slot nobody has written yet, or why it cannot be used."""
    if not line.strip(b"\x00"):
        return None
    padded, tail = line[:_CRC_AT], line[_CRC_AT:]
    if len(line) != SLOT or tail != b" crc=%08x\n" % zlib.crc32(padded):
        return _TORN
    match = _LINE.fullmatch(padded)
    if match is None:
        return f"not of format {FORMAT}"
    rank, local_rank, theirs, beat, flush, step, phase, budget, pid, at = (
        part.decode("ascii") for part in match.groups()
    )
    if theirs != attempt:
        return f"of attempt {theirs}, not {attempt}: ignored"
    if int(local_rank) != slot:
        return f"says it is local rank {local_rank}"
    budget_s = _budget(budget.encode())
    if budget_s == 0:
        return f"budget {budget} is no length of time"
    return RankBeat(
        rank=int(rank),
        local_rank=slot,
        node=node,
        beat=int(beat),
        flush=int(flush),
        step=int(step),
        phase=phase,
        phase_budget_s=budget_s,
        pid=int(pid),
        wall_at=float(at),
    )


def _shown(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode() if name.isprintable() else repr(name)
