"""The fast search: which lines of a block hold a literal of some signature.

hyperscan (wheels for x86-64 and aarch64) where it is installed, else one `bytes.find` loop a literal: sixty times slower, but
five times faster than Python's regular expression over all of them (docs/benchmarks.md)."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

Lines = Iterator[tuple[int, int, list[int]]]
"""Start, end (without newline) and the numbers of the literals found, in the order of the block."""
MANY = 60_000
CAP = 10_000  # lines looked at for one literal and log: a storm of 2,000 ranks says nothing new after that


class Search:
    """Of one log: it counts what it has handed out."""

    def __init__(self, literals: Sequence[bytes], *, hyperscan: bool | None = None) -> None:
        self._literals = tuple(literals)
        self.seen = [0] * len(literals)
        finder = _hyperscan(self._literals, ()) if hyperscan is not False else None
        if finder is None and hyperscan:
            raise ImportError("hyperscan is not installed")
        self._find = finder or _by_find(self._literals)
        self._compiled = finder is not None
        self._next_look = MANY

    def lines(self, block: bytes) -> Lines:
        hits = self._find(block, self.seen)
        if self._compiled and max(self.seen) >= self._next_look:
            self._drop_what_is_known()
        if not hits:
            return
        hits.sort()
        start, end, found = -1, -1, list[int]()
        for position, literal in hits:
            if position <= end:  # equal: the literal ends with the newline
                if literal not in found:
                    found.append(literal)
                continue
            if found:
                yield start, end, found
            start = block.rfind(b"\n", 0, position) + 1  # position is the literal's last byte
            end = block.find(b"\n", position)
            if end < 0:
                end = len(block)
            found = [literal]
        if found:
            yield start, end, found

    def _drop_what_is_known(self) -> None:
        """A call for each of a million matches costs more than to compile the rest anew."""
        full = tuple(number for number, count in enumerate(self.seen) if count >= CAP)
        self._next_look *= 8
        self._find = _hyperscan(self._literals, full) or self._find


Finder = Callable[[bytes, list[int]], list[tuple[int, int]]]


def is_fast() -> bool:
    return _hyperscan((b"text",), ()) is not None


@lru_cache(maxsize=8)
def _hyperscan(literals: tuple[bytes, ...], without: tuple[int, ...]) -> Finder | None:
    """None if it is not installed."""
    try:
        import hyperscan
    except ImportError:
        return None
    wanted = [number for number in range(len(literals)) if number not in without]
    database = hyperscan.Database()
    database.compile(
        expressions=[re.escape(literals[number]) for number in wanted],
        ids=wanted,
        elements=len(wanted),
        flags=[0] * len(wanted),
    )

    def find(block: bytes, seen: list[int]) -> list[tuple[int, int]]:
        hits: list[tuple[int, int]] = []

        def take(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            seen[number] += 1
            if seen[number] <= CAP:
                hits.append((end - 1, number))

        database.scan(block, match_event_handler=take)
        return hits

    return find


def _by_find(literals: tuple[bytes, ...]) -> Finder:
    def find(block: bytes, seen: list[int]) -> list[tuple[int, int]]:
        hits: list[tuple[int, int]] = []
        for number, literal in enumerate(literals):
            position = block.find(literal)
            while position >= 0 and seen[number] < CAP:
                seen[number] += 1
                hits.append((position + len(literal) - 1, number))
                position = block.find(literal, position + len(literal))
        return hits

    return find
