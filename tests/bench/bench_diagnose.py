"""How fast `diagnose` reads, against ripgrep with the same patterns. Prints a Markdown table; asserts nothing.

taskset -c 0 python -m tests.bench.bench_diagnose [GIGABYTES]        needs rg; logs are made in /dev/shm
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from krea_runner.diagnose.logs import diagnose
from krea_runner.diagnose.signatures import load_catalog

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


def cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def row(what: str, size: int, work: Callable[[], object]) -> None:
    begun, cpu = time.perf_counter(), cpu_s()
    work()
    wall, cpu = time.perf_counter() - begun, cpu_s() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"| {what} | {cpu:.2f} | {wall:.2f} | {size / cpu / 1e9:.2f} | {peak} |")


def main() -> None:
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 1) * 1e9)
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="krea-bench-", dir=place) as name:
        folder = Path(name)
        (folder / "patterns").write_bytes(
            b"\n".join(literal.rstrip(b"\n") for literal in load_catalog().literals) + b"\n"
        )
        print("| what | CPU s | wall s | GB per CPU s | peak MB |\n|---|---|---|---|---|")
        for kind, make in (("healthy", healthy), ("512 ranks' tracebacks", crash)):
            path = folder / "a.log"
            with path.open("wb") as file:
                file.writelines(pieces(make, size))
            row(f"diagnose, {kind}", size, partial(diagnose, [str(path)]))
            if shutil.which("rg"):
                argv = ["rg", "-j1", "-c", "-F", "-f", str(folder / "patterns"), str(path)]
                row(f"ripgrep, {kind}", size, partial(subprocess.run, argv, stdout=subprocess.DEVNULL, check=False))


if __name__ == "__main__":
    main()
