"""Feed `diagnose` damaged logs, kernel logs, job files, Flight Recorder dumps and RAS reports until a time is over.

    python -m tests.fuzz_diagnose --for 600
    python -m tests.fuzz_diagnose --seed 4711        # one case again, with its files kept

Each case is drawn from its own seed. It fails where anything but our own error comes out, more than twelve lines or a control
character would reach the terminal, the JSON cannot be written, the search without hyperscan answers otherwise, or it costs more
than CASE_CPU_S. The suite runs it for seconds (tests/unit/test_diagnose_robust.py).
"""

import argparse
import gzip
import json
import lzma
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import zstandard

from krea_runner.cli.diagnose import _layout, lines
from krea_runner.diagnose import gather
from krea_runner.diagnose.document import document
from krea_runner.diagnose.dumps import with_flight_recorder, with_ras
from krea_runner.diagnose.logs import diagnose
from krea_runner.diagnose.scan import Search
from krea_runner.diagnose.signatures import load_catalog
from krea_runner.errors import KreaRunnerError
from tests.cases.stories import STORIES
from tests.cases.stories import write as write_story
from tests.flight_dumps import RECORDED, as_nccl, recorded
from tests.flight_dumps import write as write_dumps
from tests.unit.test_nccl_ras import ASYNC, DEAD_AND_MISSING, STATUS, STRAGGLERS, job, report, text

CASE_CPU_S = 5.0
CATALOG = load_catalog()
PIECES = [literal.decode() for literal in CATALOG.literals] + [e for s in CATALOG.signatures for e in s.examples]
NOISE = (
    "\x00", "\r", "\x1b[31m", "\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\u202e", "99999999999999999999", "-1", "0", "1e400",
    "[rank99999999999]: ", "[rank-1]: ", "2024-02-31T25:61:61",
    "[Wed Feb 31 25:61:61 0000] ", "E0000 00:00:00 ", "[PG 0 Rank 3] ",
    "123456: ", "100%|###", "(", "[", "{", ")", "]", "}", "|", ":", "..", "PCI:0000:ff:1f.7", "0x", "n[1-99999999]", "n1,n2",
)  # fmt: skip
WRONG = (None, True, -1, 0, 1 << 70, 1.5, "", "x", [], {}, [[]], {"a": 1}, ["n1"] * 3, "n" * 300)
RAS = (text(DEAD_AND_MISSING + ASYNC, STRAGGLERS + STATUS), report(job()))


def damaged(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((0, 1, 1, 3, 10, 40))):
        at = chance.randrange(len(data) + 1)
        reach = at + min(int(chance.expovariate(0.02)), 4000)
        piece = chance.choice((
            b"", b"\n", chance.choice(PIECES).encode(), chance.choice(NOISE).encode(),
            chance.randbytes(chance.randrange(9)), data[at:reach] * chance.choice((1, 2, 50)),
        ))  # fmt: skip
        data = data[:at] + piece + data[chance.choice((at, at + 1, reach)) :]
    rows = data.split(b"\n")
    if chance.random() < 0.2:
        chance.shuffle(rows)
    if chance.random() < 0.2:
        rows = [b"%3d: " % chance.randrange(64) + row for row in rows]
    return b"\n".join(rows)[: chance.choice((None, None, chance.randrange(len(data) + 1)))]


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".log": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def prepare(folder: Path, chance: random.Random) -> None:
    """The files of one case."""
    write_story(chance.choice(STORIES), folder / "story")
    settings = json.loads((folder / "story" / "job.json").read_text())
    for key in chance.sample(sorted(settings), chance.choice((0, 0, 1, 2))):
        settings[key] = chance.choice(WRONG)
    whole = json.dumps(settings).encode()
    (folder / "job.json").write_bytes(whole if chance.random() < 0.9 else damaged(whole, chance))
    for path in sorted((folder / "story").glob("*.txt")):
        suffix = chance.choice((".log", ".log", ".log", ".gz", ".xz", ".zst"))
        data = PACKED[suffix](damaged(path.read_bytes(), chance))
        if chance.random() < 0.1:
            data = data[: chance.randrange(len(data) + 1)]
        (folder / (path.stem + suffix)).write_bytes(data)
    (folder / "dumps").mkdir()
    dumps = recorded(chance.choice(sorted(path.name for path in RECORDED.iterdir())))
    write_dumps(as_nccl(dumps) if chance.random() < 0.5 else dumps, folder / "dumps")
    for path in (folder / "dumps").iterdir():
        data = bytearray(path.read_bytes())
        for _ in range(chance.choice((0, 0, 1, 3))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
    (folder / "ras.txt").write_bytes(damaged(chance.choice(RAS).encode(), chance))


def answer(folder: Path) -> str:
    """What the command line would print, as JSON and as text; or our own error."""
    try:
        logs = [str(path) for path in sorted(folder.glob("log*"))]
        kernel = {path.name.split(".")[1]: str(path) for path in sorted(folder.glob("dmesg*"))}
        verdict = diagnose(logs, layout=_layout(folder / "job.json"), dmesg=kernel, catalog=CATALOG)
        for step in (
            lambda seen: with_flight_recorder(seen, folder / "dumps", CATALOG.causes),
            lambda seen: with_ras(seen, (folder / "ras.txt").read_text(errors="replace"), _layout(None)),
        ):
            try:
                verdict = step(verdict)
            except KreaRunnerError as error:
                verdict = check_error(error) and verdict
        shown = lines(verdict)
        assert len(shown) <= 12, f"{len(shown)} lines"
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", "".join(shown)), (
            "a control character reaches the terminal"
        )
        return "\n".join([*shown, json.dumps(document(verdict))])
    except KreaRunnerError as error:
        check_error(error)
        return f"{type(error).__name__}: {error}"


def check_error(error: KreaRunnerError) -> bool:
    assert str(error).strip(), "an error without words"
    assert len(str(error)) < 5000, "an error that fills the screen"
    return True


def plain_search(literals: tuple[bytes, ...]) -> Search:
    return Search(literals, hyperscan=False)


def run(seed: int, folder: Path) -> None:
    prepare(folder, random.Random(seed))
    begun = time.process_time()
    said = answer(folder)
    cost_s = time.process_time() - begun
    assert cost_s < CASE_CPU_S, f"{cost_s:.1f} s of CPU"
    usual, gather.Search = gather.Search, plain_search  # type: ignore[misc,assignment]
    try:
        assert answer(folder) == said, "the search without hyperscan answers otherwise"
    finally:
        gather.Search = usual  # type: ignore[misc]


def fuzz(seconds: float, first_seed: int) -> tuple[int, list[int]]:
    """How many cases ran, and the seeds of those that failed."""
    failed: list[int] = []
    seed, end = first_seed, time.monotonic() + seconds
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory(prefix="krea-fuzz-") as name:
            try:
                run(seed, Path(name))
            except Exception:  # noqa: BLE001 - to find them is what this is for
                sys.stderr.write(f"--- seed {seed}\n{traceback.format_exc()}")
                failed.append(seed)
        seed += 1
    return seed - first_seed, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        folder = Path(tempfile.mkdtemp(prefix="krea-fuzz-"))
        print(folder)
        run(options.seed, folder)
        return 0
    first = random.SystemRandom().randrange(1 << 40)
    count, failed = fuzz(options.seconds, first)
    print(f"{count} cases from seed {first}; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
