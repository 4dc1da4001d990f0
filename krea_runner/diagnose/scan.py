"""The fast search: which lines of a block hold a literal of some signature.

hyperscan (wheels for x86-64 and aarch64) where it is installed, else one `bytes.find` loop a literal, which the C library
makes several times faster than a regular expression over all of them (docs/benchmarks.md)."""

from collections.abc import Callable, Iterator, Sequence

Lines = Iterator[tuple[int, int, list[int]]]
"""Start, end (without newline) and the numbers of the literals found, in the order of the block."""
CAP = 20_000  # lines looked at for one literal and log: a storm of 2,000 ranks says nothing new after that


class Search:
    """Of one log: it counts what it has handed out."""

    def __init__(self, literals: Sequence[bytes], *, hyperscan: bool | None = None) -> None:
        self._literals = literals
        self.seen = [0] * len(literals)
        finder = _hyperscan(tuple(literals)) if hyperscan is not False else None
        if finder is None and hyperscan:
            raise ImportError("hyperscan is not installed")
        self._find = finder or _by_find(tuple(literals))

    def lines(self, block: bytes) -> Lines:
        hits = self._find(block, self.seen)
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


Finder = Callable[[bytes, list[int]], list[tuple[int, int]]]
_compiled: dict[tuple[bytes, ...], "Finder | None"] = {}


def _hyperscan(literals: tuple[bytes, ...]) -> Finder | None:
    if literals not in _compiled:
        _compiled[literals] = _compile(literals)
    return _compiled[literals]


def _compile(literals: tuple[bytes, ...]) -> Finder | None:
    try:
        import hyperscan
    except ImportError:
        return None
    import re

    database = hyperscan.Database()
    database.compile(
        expressions=[re.escape(literal) for literal in literals],
        ids=list(range(len(literals))),
        elements=len(literals),
        flags=[0] * len(literals),
    )

    def find(block: bytes, seen: list[int]) -> list[tuple[int, int]]:
        hits: list[tuple[int, int]] = []

        def take(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            if seen[number] < CAP:
                seen[number] += 1
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
