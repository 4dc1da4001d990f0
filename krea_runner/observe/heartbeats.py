"""Reads heartbeats/<attempt>/: one file a node, one slot a local rank (heartbeat.py writes them).

Files are opened afresh, read once and bounded; a slot that is torn, empty, foreign or of another attempt never becomes
a record. What could not be read is said, one line a file or slot.
"""

import errno
import math
import os
import re
import zlib
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
_SEEN: dict[tuple[str, str], dict[str, tuple[bytes, dict[int, RankBeat]]]] = {}
KEPT_FOLDERS = 64


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
    for name in names:
        if not _NODE.fullmatch(name):
            problems.append(f"{_shown(name)}: not named after a node")
            continue
        path, node = f"{folder}/{name}", name[:-3]
        try:
            data = _read(path)
            known = before.get(name)
            whole = known[1] if known is not None and known[0] == data else _parse_whole(data, node, attempt)
            if whole and ranks.keys().isdisjoint(whole):
                seen[name] = data, whole
                ranks |= whole
                continue
            parsed = _parse_slots(data, node, attempt)
            if _TORN in parsed:  # caught in the middle of a write: the next look finds it whole
                parsed = _parse_slots(_read(path), node, attempt)
        except OSError as error:
            problems.append(f"{_shown(name)}: {error.strerror or error}")
            continue
        problems += _take(ranks, parsed, name)
    return HeartbeatReading(ranks=tuple(ranks[rank] for rank in sorted(ranks)), problems=tuple(problems))


def _take(ranks: dict[int, RankBeat], parsed: list[RankBeat | str | None], name: str) -> list[str]:
    """Add to `ranks` what is in a file's slots; returns what is wrong with them."""
    problems = []
    for slot, beat in enumerate(parsed):
        if isinstance(beat, str):
            problems.append(f"{_shown(name)} slot {slot}: {beat}")
        elif beat is not None:
            other = ranks.get(beat.rank)
            if other is not None:
                problems.append(f"{_shown(name)} slot {slot}: rank {beat.rank} is in another slot too")
            if other is None or other.flush < beat.flush:
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


def _parse_whole(data: bytes, node: str, attempt: str) -> dict[int, RankBeat] | None:
    """By rank, all slots of a file in which nothing is amiss, at a third of what `_parse` takes; None where anything is."""
    found = _WHOLE.findall(data)
    if len(found) * SLOT != len(data):
        return None
    beats = {}
    own = attempt.encode()
    for slot, (rank, local, theirs, beat, flush, step, phase, budget, pid, at, crc) in enumerate(found):
        start = slot * SLOT
        whole = zlib.crc32(data[start : start + _CRC_AT]) == int(crc, 16)
        budget_s = None if budget == b"-" else _budget(budget)
        if not whole or theirs != own or int(local) != slot or budget_s == 0:
            return None
        number, word = int(rank), phase.decode()
        beats[number] = RankBeat(
            number, slot, node, int(beat), int(flush), int(step), word, budget_s, int(pid), float(at)
        )
    return beats if len(beats) == len(found) else None


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
