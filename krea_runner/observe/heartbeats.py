"""Reads heartbeats/<attempt>/: one file a node, one slot a local rank (heartbeat.py writes them).

Files are opened afresh, read once and bounded; a slot that is torn, empty, foreign or of another attempt never becomes
a record. What could not be read is said, one line a file or slot.
"""

import math
import os
import re
import stat
import zlib
from pathlib import Path

from krea_runner.heartbeat import FORMAT, MAX_LOCAL_RANKS, SLOT
from krea_runner.model import HeartbeatReading, RankBeat

_LINE = re.compile(
    rb"%s rank=(\d{1,9}) local=(\d{1,4}) attempt=([!-~]{1,64}) beat=(\d{1,18}) flush=(\d{1,18}) step=(-1|\d{1,18}) "
    rb"phase=([!-~]{1,24}) budget=(-|[0-9.e+-]{1,16}) pid=(\d{1,10}) at=(\d{1,12}\.\d{3}) *" % FORMAT.encode()
)
_NODE = re.compile(r"[A-Za-z0-9._+\[\]-]{1,64}")  # what the writer makes of a node's name
_CRC_AT = SLOT - 14
_TORN = "torn, or not a heartbeat"


def read_heartbeats(directory: Path, attempt: str) -> HeartbeatReading:
    """Ranks in order. A directory that is not there yet is an empty reading: nobody has started to beat."""
    ranks: dict[int, RankBeat] = {}
    problems: list[str] = []
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".hb"))
    except FileNotFoundError:
        return HeartbeatReading()
    except OSError as error:
        return HeartbeatReading(problems=(f"could not list heartbeats in {directory}: {error.strerror}",))
    for name in names:
        if not _NODE.fullmatch(name.removesuffix(".hb")):
            problems.append(f"{_shown(name)}: not named after a node")
            continue
        try:
            parsed = _parse_file(directory / name, attempt)
            if _TORN in parsed:  # caught in the middle of a write: the next look finds it whole
                parsed = _parse_file(directory / name, attempt)
        except OSError as error:
            problems.append(f"{_shown(name)}: {error.strerror or error}")
            continue
        for slot, beat in enumerate(parsed):
            if isinstance(beat, str):
                problems.append(f"{_shown(name)} slot {slot}: {beat}")
            elif beat is not None:
                other = ranks.get(beat.rank)
                if other is not None:
                    problems.append(f"{_shown(name)} slot {slot}: rank {beat.rank} is in another slot too")
                if other is None or other.flush < beat.flush:
                    ranks[beat.rank] = beat
    return HeartbeatReading(ranks=tuple(ranks[rank] for rank in sorted(ranks)), problems=tuple(problems))


def _parse_file(path: Path, attempt: str) -> list[RankBeat | str | None]:
    """One entry a slot, in order."""
    data = _read(path)
    node = path.name.removesuffix(".hb")
    return [_parse(data[start : start + SLOT], node, start // SLOT, attempt) for start in range(0, len(data), SLOT)]


def _read(path: Path) -> bytes:
    # A FIFO or a link put in a file's place must not block or lead astray.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        return os.pread(descriptor, SLOT * MAX_LOCAL_RANKS, 0)
    finally:
        os.close(descriptor)


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
    try:
        budget_s = None if budget == "-" else float(budget)
    except ValueError:
        return f"budget {budget} is no number"
    if budget_s is not None and not 0 < budget_s < math.inf:
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
