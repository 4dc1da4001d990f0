"""How fast `krea-runner diagnose` reads, against ripgrep with the same literals. Prints Markdown tables; asserts nothing.

    taskset -c 1 python -m tests.bench.bench_diagnose speed [GIGABYTES]     needs rg; the logs are made in /dev/shm
    python -m tests.bench.bench_diagnose memory [GIGABYTES]                 through a FIFO: nothing is written to a disk
    python -m tests.bench.bench_diagnose first                              a log of 20 MB, as a person waits for it

Each row is a process of its own; speed takes turns and prints medians of TIMES.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from krea_runner.diagnose.signatures import load_catalog

TIMES = 5
UNIT_BYTES = 32 << 20
FRAME = '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line {}, in _call_impl\n'
FRAME += "{}    return forward_call(*args, **kwargs)\n"


def healthy(n: int) -> str:
    if n % 10 < 7:
        return (
            f"{n % 512:3d}: step {n:6d} | loss 2.{n % 9973:04d} | lr 3.00e-04 | 1.75 s/it | 3931 tok/s/gpu | eta 11h\n"
        )
    if n % 10 < 9:
        return f" [2025-03-18 07:03:21.780901] iteration {n:8d}/ 50000 | time (ms): 1774.4 | number of nan iterations:   0 |\n"
    return f"n{n % 64:02d}:704572:705272 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read {n}\n"


def crash(n: int) -> str:
    who = f"[rank{n % 512}]: "
    frames = "".join(who + FRAME.format(1500 + i, who) for i in range(8))
    stack = "".join(
        f"{who}frame #{i}: c10::cuda::launch(int) + 0x{i}f (0x7f{n:05d} in /opt/lib/libc10_cuda.so)\n" for i in range(8)
    )
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    return f"{who}Traceback (most recent call last):\n{frames}{who}{error}\n{who}Compile with x to enable y\n{stack}"


def pieces(make: Callable[[int], str], size: int) -> Iterator[bytes]:
    unit, number, rows = 0, 0, list[str]()
    while unit < UNIT_BYTES:
        rows.append(make(number))
        unit, number = unit + len(rows[-1]), number + 1
    data = "".join(rows).encode()
    for _ in range(0, size, len(data)):
        yield data


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    wall_s: float
    peak_mb: int


def cost(argv: Sequence[str]) -> Cost:
    begun = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in {0, 1}:  # rg: no line matched
        raise SystemExit(f"{argv} ended with {process.returncode}")
    return Cost(used.ru_utime + used.ru_stime, time.perf_counter() - begun, used.ru_maxrss // 1024)


def diagnose(path: Path, *, hyperscan: bool = True) -> list[str]:
    without = "" if hyperscan else "import sys; sys.modules['hyperscan'] = None; "
    return [sys.executable, "-c", f"{without}from krea_runner.cli.app import main; main()", "diagnose", str(path)]


def ripgrep(path: Path, patterns: Path) -> list[str]:
    patterns.write_bytes(b"\n".join(literal.rstrip(b"\n") for literal in load_catalog().literals) + b"\n")
    return ["rg", "-j1", "-c", "-F", "-f", str(patterns), str(path)]


KINDS = {"healthy": healthy, "512 ranks' tracebacks": crash}


def beside(work: Callable[[], object]) -> int:
    """In a process of its own: a child's peak on Linux begins with what its parent held when it was started."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def write(path: Path, make: Callable[[int], str], size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in pieces(make, size):
            at = 0
            while at < min(len(piece), size):
                at += file.write(piece[at:size]) or 0


def speed(folder: Path, size: int) -> None:
    print("| what | CPU s | wall s | GB per CPU s | peak MB |\n|---|---|---|---|---|")
    for kind, make in KINDS.items():
        path = folder / "a.log"
        os.waitpid(beside(partial(write, path, make, size)), 0)
        rows = {
            "diagnose": diagnose(path),
            "ripgrep": ripgrep(path, folder / "patterns"),
            "diagnose without hyperscan": diagnose(path, hyperscan=False),
        }
        costs: dict[str, list[Cost]] = {what: [] for what in rows}
        for _ in range(TIMES):
            for what, argv in rows.items():
                costs[what].append(cost(argv))
        for what, seen in costs.items():
            cpu_s = statistics.median(one.cpu_s for one in seen)
            wall_s = statistics.median(one.wall_s for one in seen)
            peak_mb = max(one.peak_mb for one in seen)
            print(
                f"| {what}, {kind} | {cpu_s:.2f} | {wall_s:.2f} | {path.stat().st_size / cpu_s / 1e9:.2f} | {peak_mb} |"
            )


def memory(folder: Path, size: int) -> None:
    print("| what | GB | CPU s | peak MB |\n|---|---|---|---|")
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    for kind, make in KINDS.items():
        for some in (size // 100, size):
            writer = beside(partial(write, pipe, make, some))
            used = cost(diagnose(pipe))
            os.waitpid(writer, 0)
            print(f"| diagnose, {kind} | {some / 1e9:g} | {used.cpu_s:.1f} | {used.peak_mb} |")


def first(folder: Path, size: int) -> None:
    print("| a log of 20 MB | wall s | CPU s |\n|---|---|---|")
    for kind, make in KINDS.items():
        path = folder / "a.log"
        os.waitpid(beside(partial(write, path, make, size)), 0)
        for with_hyperscan in (True, False):
            seen = [cost(diagnose(path, hyperscan=with_hyperscan)) for _ in range(TIMES)]
            what = kind if with_hyperscan else f"{kind}, without hyperscan"
            wall_s, cpu_s = (
                statistics.median(values) for values in zip(*((s.wall_s, s.cpu_s) for s in seen), strict=True)
            )
            print(f"| {what} | {wall_s:.2f} | {cpu_s:.2f} |")


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else "speed"
    work, gigabytes = {"speed": (speed, 1.0), "memory": (memory, 10.0), "first": (first, 0.02)}[what]
    size = int(float(sys.argv[2] if len(sys.argv) > 2 else gigabytes) * 1e9)
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="krea-bench-", dir=place) as name:
        work(Path(name), size)


if __name__ == "__main__":
    main()
