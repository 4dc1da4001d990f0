"""What a beat costs the training thread, and what reading them costs the supervisor. Prints a table; asserts nothing.

    python -m tests.bench.bench_heartbeat

The rival in the same run is what hand-written watchdogs do: a beat that opens, writes and closes a file.
"""

import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

BEATS = 1_000_000
NODES, RANKS = 2048, 8


def main() -> None:
    print("| what | cost |\n|---|---|")
    with tempfile.TemporaryDirectory(prefix="krea-bench-") as folder:
        os.environ |= {
            "KREA_HEARTBEAT_DIR": f"{folder}/beats",
            "KREA_ATTEMPT": "1.r0",
            "SLURMD_NODENAME": "n1",
            "RANK": "0",
        }
        from krea_runner import Heartbeat

        with Heartbeat() as heartbeat:
            beat_ns = per_call_ns(heartbeat.step, BEATS)
        file_ns = per_call_ns(FileBeat(Path(folder) / "beat").step, 20_000)
        print(f"| `hb.step(n)`, its flusher running | {beat_ns:.0f} ns |")
        print(
            f"| rival: write a file at each beat (local disk) | {file_ns:.0f} ns, {file_ns / beat_ns:.0f} times as much |"
        )
        read_all(Path(folder) / "many")


def per_call_ns(step: Callable[[int], None], times: int) -> float:
    """The median of five rounds; the loop itself is taken off, the call is not."""
    rounds = []
    for _ in range(5):
        started = time.perf_counter_ns()
        for number in range(times):
            step(number)
        called = time.perf_counter_ns()
        for _number in range(times):
            pass
        rounds.append((called - started - (time.perf_counter_ns() - called)) / times)
    return statistics.median(rounds)


class FileBeat:
    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, number: int) -> None:
        with self.path.open("w") as file:
            file.write(f"{number} {time.time()}\n")


def read_all(folder: Path) -> None:
    from krea_runner.heartbeat import FORMAT, SLOT
    from krea_runner.observe.heartbeats import read_heartbeats

    folder.mkdir()
    for node in range(NODES):
        lines = b""
        for local in range(RANKS):
            body = (
                f"{FORMAT} rank={node * RANKS + local} local={local} attempt=1.r0 beat=7 flush=9 step=7 phase=step budget=- "
                "pid=1 at=1.000"
            )
            padded = body.ljust(SLOT - 14).encode()
            lines += padded + b" crc=%08x\n" % zlib.crc32(padded)
        (folder / f"n{node}.hb").write_bytes(lines)
    wall, cpu = time.perf_counter(), time.process_time()
    reading = read_heartbeats(folder, "1.r0")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"| reading {len(reading.ranks)} ranks from {NODES} files (local disk) | {wall * 1000:.0f} ms, CPU {cpu * 1000:.0f} ms |"
    )


if __name__ == "__main__":
    main()
