"""A pickle of containers, text, numbers, booleans and None from a file that nobody vouches for: bytes in, the value out.

`pickle.Unpickler` in C reads a Flight Recorder dump several times as fast as a loop over its opcodes in Python, and
with `find_class` blocked it runs no code. But a 20-byte file can make it allocate 64 GB (LONG_BINPUT), a nested tuple
as a key of a table overflows the C stack or is hashed for ever, and a million chosen numbers as keys take hours. So
each opcode is looked at first (a regular expression over those of fixed width, in C too): another than of plain data
is refused, memo numbers are bounded, and what makes a tuple or fills a table is rewritten so that it comes by
`persistent_load`, where keys must be text and a tuple becomes a list.
"""

import io
import pickle
import re
from typing import Any

from krea_runner.errors import KreaRunnerError

# The smallest opcodes with something behind them in memory: 64 times their size. A dump has one in 20 bytes.
MOST_CONTAINERS = 8_000_000

# Opcodes of fixed width, with their arguments: BINGET, LONG_BINPUT and LONG_BINGET (of at most 4 million values), those
# without an argument, BININT1 and BINPUT, BININT, BININT2, BINFLOAT, LONG1 (8 bytes: c10's; else shorter), PROTO.
_FIXED = re.compile(
    rb"(?:h.|[rj]..[\x00-\x3f]\x00|[\]}N\x88\x89(ae\x94]|[Kq].|J.{4}|M..|G.{8}"
    rb"|\x8a(?:\x08.{8}|\x07.{7}|\x00|\x01.|\x02..|\x03...|\x04.{4}|\x05.{5}|\x06.{6}|\x09.{9})|\x80.)*+",
    re.DOTALL,
)
_TEXT_WIDTH = {0x58: 4, 0x8C: 1, 0x8D: 8}  # BINUNICODE, SHORT_BINUNICODE, BINUNICODE8
# LIST, TUPLE1 to 3 and BINPERSID (hands the top of the stack to persistent_load) in the place of ...
_REWRITTEN = {
    0x29: b"]",  # EMPTY_TUPLE
    0x74: b"l",  # TUPLE
    0x85: b"\x85\x85Q",  # TUPLE1 to 3: ((a, b),)
    0x86: b"\x86\x85Q",
    0x87: b"\x87\x85Q",
    0x75: b"l\x86Q",  # SETITEMS: (table, [key, value, key, value])
    0x73: b"\x87Q",  # SETITEM: (table, key, value)
}
_FRAME, _STOP = 0x95, 0x2E
_TEXT = frozenset({str})
_NAMES = frozenset(b"cR\x93\x81\x92bioQP\x82\x83\x84")


class PickleError(KreaRunnerError):
    """Cut short, damaged, or more than plain data."""


def load_plain(data: bytes) -> object:
    """Tuples come as lists. The value may contain itself, as in any pickle: walk it only as deep as is meant.

    Raises: PickleError.
    """
    if data.count(b"]") + data.count(b"}") > MOST_CONTAINERS:
        raise PickleError(f"more than {MOST_CONTAINERS} lists and tables")
    plain = _looked_at(data)
    try:
        # One frame: without it the reader asks the file for each opcode.
        return _Plain(io.BytesIO(b"\x95" + len(plain).to_bytes(8, "little") + plain)).load()
    except UnicodeDecodeError:
        raise PickleError("damaged: text that is not UTF-8") from None
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:
        raise PickleError(f"damaged: {str(error)[:80]!a}") from None


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("names a class")

    def persistent_load(self, value: Any) -> Any:
        """What `_REWRITTEN` puts together; the file itself cannot come here."""
        if len(value) == 1:
            return list(value[0])
        table, items = value if len(value) == 2 else (value[0], value[1:])
        keys = items[::2]
        if type(table) is not dict or not _TEXT.issuperset(map(type, keys)):
            raise pickle.UnpicklingError("a key that is no text, or sets an item of what is no table")
        table.update(zip(keys, items[1::2], strict=True))
        return table


def _looked_at(data: bytes) -> bytes:
    """`data` up to its end mark, rewritten, and without frames (they count bytes, and only help buffering)."""
    pieces: list[bytes] = []
    begun = at = 0
    while True:
        at = _FIXED.match(data, at).end()  # type: ignore[union-attr]  # it matches nothing at least
        if at >= len(data):
            raise PickleError(f"cut short: no end mark in {at} bytes")
        code = data[at]
        if code in _TEXT_WIDTH:
            width = _TEXT_WIDTH[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif code in _REWRITTEN:
            pieces += (data[begun:at], _REWRITTEN[code])
            begun = at = at + 1
        elif code == _FRAME:
            pieces.append(data[begun:at])
            begun = at = at + 9
        elif code == _STOP:
            return b"".join((*pieces, data[begun : at + 1]))
        else:
            raise _refusal(data, at)


def _refusal(data: bytes, at: int) -> PickleError:
    code = data[at]
    if code in _NAMES:
        said = f"refused: opcode {code:#04x} at byte {at} names a class, a function or another object"
        return PickleError(said, hint="No flight recorder writes that; do not load the file elsewhere.")
    return PickleError(f"no plain data, damaged or cut short: opcode {code:#04x} at byte {at} of {len(data)}")
