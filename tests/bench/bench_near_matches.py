"""How long the slowest patterns take on the worst lines that can be made of their own words. Asserts nothing; prints tables.

    python -m tests.bench.bench_near_matches

A line is looked at up to TEXT_LIMIT characters. Each example of each signature is cut at every word, and its pieces repeated
until the line is full: what a regular expression that backtracks is slow on. A log of such
lines must cost in proportion to its size.
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterator

from krea_runner.diagnose.lines import TEXT_LIMIT
from krea_runner.diagnose.logs import diagnose
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


def cost_s(work: Callable[..., object], argument: object) -> float:
    begun = time.process_time()
    work(argument)
    return time.process_time() - begun


def worst_lines() -> list[tuple[float, float, str, str]]:
    """For each signature: seconds at the full length, at half of it, its name, the line."""
    worst = []
    for signature in load_catalog().signatures:
        found = (0.0, 0.0, signature.name, "")
        for example in signature.examples:
            for short, long in zip(
                near_matches(example, TEXT_LIMIT // 2), near_matches(example, TEXT_LIMIT), strict=True
            ):
                took = min(cost_s(signature.pattern.match, long) for _ in range(2))
                if took > found[0]:
                    found = (took, cost_s(signature.pattern.match, short), signature.name, long)
        worst.append(found)
    return sorted(worst, reverse=True)


def main() -> None:
    worst = worst_lines()
    print(f"| signature | ms at {TEXT_LIMIT} characters | ms at half of it |\n|---|---|---|")
    for took, half, name, _ in worst[:SHOWN]:
        print(f"| {name} | {took * 1000:.1f} | {half * 1000:.1f} |")
    print("\n| MB of such lines, of all signatures | CPU s |\n|---|---|")
    lines = "".join(line + "\n" for *_, line in worst).encode(errors="replace")
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        for times in (4, 8, 16, 32):
            file.seek(0)
            file.write(lines * times)
            file.flush()
            print(f"| {len(lines) * times / 1e6:.0f} | {cost_s(diagnose, [file.name]):.1f} |")


if __name__ == "__main__":
    main()
