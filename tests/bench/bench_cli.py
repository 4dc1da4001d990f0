"""Start-up of the command line and the cost of one quiet tick. Prints a Markdown table; asserts nothing.

python -m tests.bench.bench_cli
scripts/dev-cluster shell -- python -m tests.bench.bench_cli        adds squeue, the least that any watchdog pays
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMES = 15
KREA = [str(Path(sys.executable).with_name("krea-runner"))]


def main() -> None:
    print("| command | wall ms (median) | wall ms (min) | CPU ms |\n|---|---|---|---|")
    row("python -c pass", [sys.executable, "-c", "pass"])
    row("krea-runner --version", [*KREA, "--version"])
    row("krea-runner --help", [*KREA, "--help"])
    if shutil.which("squeue") and subprocess.run(["squeue", "--me"], capture_output=True, check=False).returncode == 0:
        row("squeue --me", ["squeue", "--me"])
    with tempfile.TemporaryDirectory(prefix="krea-bench-", ignore_cleanup_errors=True) as folder:
        os.environ["KREA_RUNNER_STATE_DIR"] = str(Path(folder) / "state")
        submit(Path(folder), 1)
        row("one quiet tick, 1 run of 4 ranks", [*KREA, "supervise", "--once"])
        for number in range(2, 11):
            submit(Path(folder), number)
        row("one quiet tick, 10 runs of 4 ranks", [*KREA, "supervise", "--once"])
        for number in range(1, 11):
            subprocess.run([*KREA, "stop", f"bench {number}"], check=True, stdout=subprocess.DEVNULL)


def submit(folder: Path, number: int) -> None:
    """A run that does nothing but be there: four sleeping ranks."""
    toml = folder / f"{number}.toml"
    toml.write_text(
        f'[run]\nname = "bench {number}"\nscheduler = "local"\ncommand = {json.dumps(["sleep", "600"])}\n'
        "[gang]\nnodes = 2\nranks_per_node = 2\n"
    )
    subprocess.run([*KREA, "submit", str(toml)], check=True, stdout=subprocess.DEVNULL)


def row(name: str, argv: list[str]) -> None:
    walls, cpus = [], []
    for _ in range(TIMES):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        walls.append((time.perf_counter() - started) * 1000)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000)
    print(f"| {name} | {statistics.median(walls):.0f} | {min(walls):.0f} | {statistics.median(cpus):.0f} |", flush=True)


if __name__ == "__main__":
    main()
