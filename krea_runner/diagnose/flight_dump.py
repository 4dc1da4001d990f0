"""One rank's PyTorch Flight Recorder dump, read without trusting it: bytes in, `RankDump` or `DumpError` out.

The usual form is a pickle, which PyTorch's own tool loads with plain `pickle` (a program in the file would run). The writer
(c10's Pickler, protocol 2) uses only containers, text, integers, booleans and None, so this reader knows just those opcodes:
anything that names a class or a function is an error, whatever it names. It is not built on `pickle.Unpickler`, because even
with `find_class` blocked a 20-byte file can make that one allocate 64 GB (LONG_BINPUT) or overflow the C stack (a deeply
nested tuple as a key). The JSON form (the debug server, `_dump_fr_trace_json`) differs in small ways; both end up alike.

Read here: dumps of torch 2.13 (version "2.10"). Older keys (`seq_id`, no dtypes, no `pg_config`, a bare list) as the analyser
of torch 2.13 and older copies of it accept them.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from krea_runner.errors import KreaRunnerError

MOST_BYTES = 64 << 20  # 2,000 entries (the default) with frames are 1 to 5 MB
MOST_ENTRIES = 1_000_000
MOST_TENSORS = 65_536  # of one coalesced call
MOST_DIMS = 64  # torch's own limit
MOST_TEXT = 4_096
MOST_FRAMES = 256
MOST_GROUPS = 65_536
WHOLE = 2**64  # no counter, time or size of a dump is larger; str() of a crafted integer could raise or take minutes
# torch's own files in a stack say nothing about where the training script was.
LIBRARY = re.compile(r"/torch/(distributed|nn|utils|_dynamo|autograd)/|/importlib/|<frozen")


class DumpError(KreaRunnerError):
    """The file is no Flight Recorder dump, is cut short, or holds what a dump never holds."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank asked of the group: equal calls join, unequal ones hang or corrupt. Shared between entries."""

    op: str
    """Without the backend: `all_reduce`, `send 0->1`."""
    backend: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """`seq` counts the group's collectives from 1; for a point-to-point call it is that rank's own p2p counter."""

    group: tuple[str, str]
    group_id: str
    seq: int
    call: Call
    is_p2p: bool
    state: str
    retired: bool
    record_id: int
    created_ns: int
    where: str
    """`file:line function` of the first frame outside torch; empty where the dump has no frames (JSON)."""

    @property
    def done(self) -> bool:
        # gloo (torch 2.13) leaves `state` at "scheduled" for ever and only retires; under NCCL retired without completed
        # is an operation that the watchdog gave up on.
        return self.state == "completed" or (self.retired and self.call.backend == "gloo")

    @property
    def started(self) -> bool:
        return self.done or self.state == "started"


@dataclass(frozen=True, slots=True)
class Status:
    """`pg_status`: sequence numbers; -1 is never."""

    enqueued: int = -1
    started: int = -1
    completed: int = -1


@dataclass(frozen=True, slots=True)
class RankDump:
    rank: int
    version: str
    entries: tuple[Entry, ...]
    """By record_id, oldest first. A ring buffer: the first may be any."""
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of each group, by the group's name."""
    status: Mapping[str, Status] = field(default_factory=dict)
    """By the group's id (`Entry.group_id`), which is another thing than its name."""


def read_dump(path: Path, rank: int) -> RankDump:
    return parse_dump(_bytes_of(path), rank, name=path.name)


def parse_dump(data: bytes, rank: int, *, name: str = "dump") -> RankDump:
    try:
        document = _json(data) if data.lstrip()[:1] in {b"{", b"["} and data[:1] != b"\x80" else load_pickle(data)
        return _dump(document, rank)
    except DumpError as error:
        raise DumpError(f"flight recorder dump {name!a}: {error}", hint=error.hint) from None


def _bytes_of(path: Path) -> bytes:
    try:
        # O_NONBLOCK: the dump trigger of a live job is a FIFO beside the dumps, and opening one would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise DumpError(f"flight recorder dump {path.name!a}: not a regular file")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DumpError(f"flight recorder dump {path.name!a}: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise DumpError(
            f"flight recorder dump {path.name!a}: {status.st_size} bytes, more than {MOST_BYTES} are not read",
            hint="Set TORCH_FR_BUFFER_SIZE lower (2000 is enough for any verdict).",
        )
    return data


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"broken JSON: {str(error)[:120]}") from None


# ------------------------------------------------------------------------------------------------ pickle

_MARK = object()
_TEXT_WIDTH = {0x58: 4, 0x8C: 1, 0x8D: 8}  # BINUNICODE, SHORT_BINUNICODE, BINUNICODE8
_INTEGER = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i"}  # BININT1, BININT2, BININT
_GET = {0x68: "<B", 0x6A: "<I"}  # BINGET, LONG_BINGET
_PUT = {0x71: "<B", 0x72: "<I"}  # BINPUT, LONG_BINPUT
_SMALL: dict[int, Callable[[], object]] = {
    0x5D: list,
    0x7D: dict,
    0x29: tuple,
    0x4E: lambda: None,
    0x88: lambda: True,
    0x89: lambda: False,
    0x28: lambda: _MARK,
}
_FIXED_TUPLE = {0x85: 1, 0x86: 2, 0x87: 3}
_RUNS_CODE = dict.fromkeys(b"cR\x93\x81\x92bioQPG\x82\x83\x84", "names a class, a function or another object")
_MISSING = object()


def load_pickle(data: bytes) -> object:
    """The value of a pickle that holds containers, text, integers, booleans and None; else `DumpError`.

    A value may contain itself, as in any pickle: the caller walks only as deep as a dump is.
    """
    reader = _Reader(data)
    try:
        return reader.value()
    except (IndexError, struct.error):
        raise DumpError(f"cut short or damaged: ends or breaks at byte {reader.at} of {len(data)}") from None
    except UnicodeDecodeError:
        raise DumpError(f"damaged: text that is not UTF-8 before byte {reader.at}") from None


class _Reader:
    """A stack machine over `data`; `at` is the offset of the next opcode."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, object] = {}

    def value(self) -> object:  # noqa: PLR0912 - one branch an opcode family
        data, stack, memo = self.data, self.stack, self.memo
        while True:
            code = data[self.at]
            self.at += 1
            if code in _GET:
                found = memo.get(self._number(_GET[code]), _MISSING)
                if found is _MISSING:
                    raise DumpError(f"damaged: refers to a value that is not there, before byte {self.at}")
                stack.append(found)
            elif code in _PUT:
                memo[self._number(_PUT[code])] = self._top()
            elif code in _TEXT_WIDTH:
                stack.append(self._text(_TEXT_WIDTH[code]))
            elif code in _INTEGER:
                stack.append(self._number(_INTEGER[code]))
            elif code in _SMALL:
                stack.append(_SMALL[code]())
            elif code in {0x73, 0x75}:  # SETITEM, SETITEMS
                self._set_items(self._pair() if code == 0x73 else self._since_mark())
            elif code in {0x61, 0x65}:  # APPEND, APPENDS
                self._append([stack.pop()] if code == 0x61 else self._since_mark())
            elif code == 0x8A:  # LONG1
                stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))
            elif code == 0x47:  # BINFLOAT: duration_ms of a timed entry
                stack.append(struct.unpack(">d", self._take(8))[0])
            elif code in _FIXED_TUPLE:
                items = [stack.pop() for _ in range(_FIXED_TUPLE[code])]
                stack.append(tuple(reversed(items)))
            elif code == 0x74:  # TUPLE
                stack.append(tuple(self._since_mark()))
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = self._top()
            elif code == 0x80:  # PROTO
                self.at += 1
            elif code == 0x95:  # FRAME: only a hint for buffering
                self._take(8)
            elif code == 0x2E:  # STOP
                return self._top()
            else:
                raise DumpError(_refusal(code, self.at - 1), hint="Not written by PyTorch; do not load it elsewhere.")

    def _take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise IndexError
        self.at += count
        return taken

    def _number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(number)

    def _text(self, width: int) -> str:
        return self._take(int.from_bytes(self._take(width), "little")).decode("utf-8", "surrogatepass")

    def _top(self) -> object:
        if self.stack[-1] is _MARK:
            raise IndexError
        return self.stack[-1]

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        items.reverse()
        return items

    def _pair(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def _set_items(self, items: list[Any]) -> None:
        target, keys = self._top(), items[::2]
        # Text keys only: hashing a nested tuple recurses in C, without a limit.
        if not isinstance(target, dict) or len(items) % 2 or not all(isinstance(key, str) for key in keys):
            raise DumpError(f"damaged: sets an item of what is no table, before byte {self.at}")
        target.update(zip(keys, items[1::2], strict=True))

    def _append(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise DumpError(f"damaged: appends to what is no list, before byte {self.at}")
        target.extend(items)


def _refusal(code: int, at: int) -> str:
    if code in _RUNS_CODE:
        return f"refused: opcode {code:#04x} at byte {at} {_RUNS_CODE[code]}, which no flight recorder writes"
    return f"not a flight recorder pickle: opcode {code:#04x} at byte {at}"


# ------------------------------------------------------------------------------------------------ the document


def _dump(document: object, rank: int) -> RankDump:
    if isinstance(document, list):  # torch 2.2: the bare entries
        document = {"version": "1", "entries": document}
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise DumpError("not a flight recorder dump: it has no list of entries")
    raw = document["entries"]
    if len(raw) > MOST_ENTRIES:
        raise DumpError(f"{len(raw)} entries, more than {MOST_ENTRIES} are not read")
    calls: dict[Call, Call] = {}
    wheres: dict[int, str] = {}
    entries = sorted((_entry(item, calls, wheres) for item in raw), key=lambda entry: entry.record_id)
    groups, statuses = _table(document, "pg_config"), _table(document, "pg_status")
    return RankDump(
        rank,
        _short(document.get("version", "unknown")),
        tuple(entries),
        {_short(group.get("name", name)): _ranks(group.get("ranks")) for name, group in groups.items()},
        {
            name: Status(
                *(_whole(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "started", "completed"))
            )
            for name, status in statuses.items()
        },
    )


def _table(document: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    table = document.get(name) or {}
    if not isinstance(table, dict) or len(table) > MOST_GROUPS:
        raise DumpError(f"{name} is not a table of groups")
    if not all(isinstance(row, dict) for row in table.values()):
        raise DumpError(f"{name} is not a table of groups")
    return {_short(key): row for key, row in table.items()}


def _entry(raw: object, calls: dict[Call, Call], wheres: dict[int, str]) -> Entry:
    if not isinstance(raw, dict):
        raise DumpError("an entry is not a table")
    profile = _short(raw.get("profiling_name", ""))
    backend, colon, op = profile.partition(":")
    if not colon:
        backend, op = "", profile
    is_p2p = bool(raw.get("is_p2p", op.startswith(("send", "recv"))))
    # torch 2.2 (version 1.1) names no group: there is only the id, which counts the groups of that rank.
    group = raw.get("process_group", raw.get("pg_name", raw.get("pg_id", "")))
    names = [_short(part) for part in group[:2]] if isinstance(group, list | tuple) else [_short(group)]
    call = Call(
        op,
        backend,
        _sizes(raw.get("input_sizes")),
        _sizes(raw.get("output_sizes")),
        _texts(raw.get("input_dtypes")),
        _texts(raw.get("output_dtypes")),
    )
    seq = raw.get("p2p_seq_id") if is_p2p and raw.get("p2p_seq_id") else raw.get("collective_seq_id")
    return Entry(
        group=(names[0] if names else "", names[1] if len(names) > 1 else ""),
        group_id=_short(raw.get("pg_id", "")),
        seq=_whole(seq if seq is not None else raw.get("seq_id", 0)),
        call=calls.setdefault(call, call),
        is_p2p=is_p2p,
        state=_short(raw.get("state", "")),
        retired=raw.get("retired") is True,
        record_id=_whole(raw.get("record_id", raw.get("id", 0))),
        created_ns=_whole(raw.get("time_created_ns") or 0),
        where=_where(raw.get("frames"), wheres),
    )


def _short(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DumpError("a name is neither text nor a number")
    return value[:MOST_TEXT] if isinstance(value, str) else str(_whole(value))


def _whole(value: object) -> int:
    """The JSON form writes the counters of pg_status as text."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value, re.ASCII):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not -WHOLE < value < WHOLE:
        raise DumpError("a counter is not a whole number")
    return value


def _list(value: object, most: int, what: str) -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or len(value) > most:
        raise DumpError(f"{what} is not a list, or a longer one than {most}")
    return value


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    tensors = _list(value, MOST_TENSORS, "sizes")
    return tuple(tuple(_whole(dim) for dim in _list(tensor, MOST_DIMS, "a size")) for tensor in tensors)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_short(item) for item in _list(value, MOST_TENSORS, "dtypes"))


def _where(frames: object, seen: dict[int, str]) -> str:
    rows = _list(frames, MOST_ENTRIES, "frames")[:MOST_FRAMES]
    key = id(frames)  # a stack is often one shared object; it lives as long as the document
    if key not in seen:
        named = [row for row in rows if isinstance(row, dict) and "filename" in row]
        own = [row for row in named if not LIBRARY.search(_short(row["filename"]))]
        seen[key] = _frame((own or named)[0]) if named else ""
    return seen[key]


def _frame(row: Mapping[str, Any]) -> str:
    return f"{_short(row['filename'])}:{_short(row.get('line', 0))} {_short(row.get('name', ''))}".strip()


def _ranks(value: object) -> tuple[int, ...]:
    """A list, or its text: the recorder writes "[0, 1, 2]"."""
    if isinstance(value, str):
        if not re.fullmatch(r"\[[0-9, ]*\]", value, re.ASCII):
            raise DumpError("the ranks of a group are not a list of numbers")
        return _sorted(value.strip("[]").split(",") if value.strip("[] ") else ())
    return _sorted(_list(value, MOST_ENTRIES, "ranks"))


def _sorted(values: Iterable[object]) -> tuple[int, ...]:
    return tuple(sorted({_whole(value.strip() if isinstance(value, str) else value) for value in values}))
