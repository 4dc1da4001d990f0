"""How long the slowest pattern takes on the worst line that can be made of its own words. Asserts nothing; prints a table.

    python -m tests.bench.bench_near_matches

A line is looked at up to TEXT_LIMIT characters. Each example of each signature is cut at every word, and its pieces repeated
until the line is full: what a regular expression that backtracks is slow on. Twice the length must cost about twice the time.
"""

import re
import time
from collections.abc import Iterator

from krea_runner.diagnose.lines import TEXT_LIMIT, read_line
from krea_runner.diagnose.signatures import load_catalog

SHOWN = 8


def near_matches(example: str, size: int) -> Iterator[str]:
    words = re.findall(r"\w+|\W", example)[:60]
    for cut in range(len(words)):
        head, rest = "".join(words[:cut]), "".join(words[cut:])
        for pump in {words[cut], rest, "".join(words[cut : cut + 3]), "0", " ", "a", "(", "x.", "1,"}:
            if pump:
                yield (head + pump * (size // len(pump)))[:size]
                yield (head + pump * (size // len(pump)))[: size - len(rest)] + rest[:-1] + "\x01"


def cost_s(work: object, line: str) -> float:
    begun = time.process_time()
    work(line)  # type: ignore[operator]
    return time.process_time() - begun


def main() -> None:
    catalog = load_catalog()
    worst: list[tuple[float, float, str, str]] = []
    for signature in catalog.signatures:
        found = (0.0, 0.0, signature.name, "")
        for example in signature.examples:
            for short, long in zip(
                near_matches(example, TEXT_LIMIT // 2), near_matches(example, TEXT_LIMIT), strict=True
            ):
                took = cost_s(signature.pattern.match, long)
                if took > found[0]:
                    found = (took, cost_s(signature.pattern.match, short), signature.name, long[:60])
        worst.append(found)
    header = ("read_line", lambda line: read_line(line.encode(), 2024))
    for example in {e for s in catalog.signatures for e in s.examples}:
        for long in near_matches(example, TEXT_LIMIT):
            took = cost_s(header[1], long)
            worst.append((took, 0.0, header[0], long[:60]))
    print(f"| signature | ms at {TEXT_LIMIT} characters | ms at half of it | line |\n|---|---|---|---|")
    for took, half, name, line in sorted(worst, reverse=True)[:SHOWN]:
        print(f"| {name} | {took * 1000:.2f} | {half * 1000:.2f} | `{line.encode('unicode_escape').decode()}` |")


if __name__ == "__main__":
    main()
