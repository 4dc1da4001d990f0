"""The fast search: which lines of a block hold a literal of some signature.

hyperscan (wheels for x86-64 and aarch64) where it is installed and the processor can run it. Else lines that differ only in
their digits are looked at once, by `bytes.find`: a log says few different things. Measured in docs/benchmarks.md."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

Lines = Iterator[tuple[int, int, list[int]]]
"""Start, end (without newline) and the numbers of the literals found, in the order of the block."""
MANY = 60_000
DIGITS = b"0123456789"
MOST_HELD_BYTES = 8 << 20  # of shapes and words; a log of which no two lines are alike then only costs its time
CAP = 10_000  # lines looked at for one literal and log: a storm of 2,000 ranks says nothing new after that


class Search:
    """Of one log: it counts what it has handed out."""

    def __init__(self, literals: Sequence[bytes], *, hyperscan: bool | None = None) -> None:
        self._literals = tuple(literals)
        self.seen = [0] * len(literals)
        finder = _hyperscan(self._literals, ()) if hyperscan is not False else None
        if finder is None and hyperscan:
            raise ImportError("hyperscan is not installed, or cannot run on this processor")
        self._find = finder or _ByShape(self._literals)
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
    """None if it is not installed, or cannot run here."""
    try:
        import hyperscan
    except ImportError:
        return None
    wanted = [number for number in range(len(literals)) if number not in without]
    try:
        database = hyperscan.Database()
        database.compile(
            expressions=[re.escape(literals[number]) for number in wanted],
            ids=wanted,
            elements=len(wanted),
            flags=[0] * len(wanted),
        )
    except hyperscan.HyperscanError:  # a processor without SSE4.2
        return None

    def find(block: bytes, seen: list[int]) -> list[tuple[int, int]]:
        hits: list[tuple[int, int]] = []

        def take(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            seen[number] += 1
            if seen[number] <= CAP:
                hits.append((end - 1, number))

        database.scan(block, match_event_handler=take)
        return hits

    return find


class _ByShape:
    """The same without hyperscan. A line's shape is what is left of it without its digits. A shape is looked at once, for
    its new words only; both stay known, as what the literals they may hold are."""

    def __init__(self, literals: tuple[bytes, ...]) -> None:
        self.literals = literals
        self.shapeless = [literal.translate(None, DIGITS) for literal in literals]
        self.fragments = [max(literal.split(), key=len, default=b"") for literal in self.shapeless]
        self.anywhere = tuple(number for number, fragment in enumerate(self.fragments) if not fragment)
        self.forget()

    def forget(self) -> None:
        self.shapes: dict[bytes, tuple[int, ...]] = {}
        self.words: dict[bytes, tuple[int, ...]] = {}
        self.held_bytes = 0

    def __call__(self, block: bytes, seen: list[int]) -> list[tuple[int, int]]:
        shapes = block.translate(None, DIGITS).split(b"\n")
        different = set(shapes)
        if not different <= self.shapes.keys():
            self.learn(different)
        wanted = {shape: [n for n in self.shapes[shape] if seen[n] < CAP] for shape in different}
        if not any(wanted.values()):
            return []
        hits: list[tuple[int, int]] = []
        end = -1
        for shape, line in zip(shapes, block.split(b"\n"), strict=True):
            start, end = end + 1, end + 1 + len(line)
            for number in wanted[shape]:
                literal = self.literals[number]
                at = block.find(literal, start, end + 1)  # with the newline, which a literal may end with
                while at >= 0:
                    seen[number] += 1
                    if seen[number] <= CAP:
                        hits.append((at + len(literal) - 1, number))
                    at = block.find(literal, at + 1, end + 1)
        return hits

    def learn(self, shapes: set[bytes]) -> None:
        if self.held_bytes > MOST_HELD_BYTES:
            self.forget()
        shapes = shapes.difference(self.shapes)  # of the table itself: `- keys()` would go through all of it
        words = set(b"\n".join(shapes).split())
        fresh = words.difference(self.words)
        self.held_bytes += sum(100 + len(item) for items in (shapes, fresh) for item in items)
        self.words.update(dict.fromkeys(fresh, ()))
        text = b"\n".join(fresh) + b"\n"
        for number, fragment in enumerate(self.fragments):
            at = text.find(fragment) if fragment else -1
            while at >= 0:
                end = text.index(b"\n", at)
                self.words[text[text.rfind(b"\n", 0, at) + 1 : end]] += (number,)
                at = text.find(fragment, end)
        self.shapes.update(dict.fromkeys(shapes, self.anywhere))
        telling = {word for word in words if self.words[word]}
        if telling:
            for shape in shapes:
                found = {number for word in telling.intersection(shape.split()) for number in self.words[word]}
                held = tuple(number for number in found if self.shapeless[number].rstrip(b"\n") in shape)
                self.shapes[shape] = self.anywhere + held
