"""What one look costs at 16,384 ranks, and what a whole tick does; what following logs costs. Prints tables; asserts nothing.

    python -m tests.bench.bench_observe [--nodes 2048] [--ranks 8] [--times 7] [--folder DIR]

The rival stands in the same table and takes turns with us: a bare loop that opens, reads and closes the same files and makes
nothing of them. `--folder`: on the file system to be measured (default: a temporary directory).
"""

import argparse
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from krea_runner.cli.supervise import COLLECT_AFTER
from krea_runner.clock import SystemClock
from krea_runner.diagnose.hang import judge_hang
from krea_runner.heartbeat import FORMAT, SLOT
from krea_runner.history.store import open_history
from krea_runner.history.watches import watch_from_text, watch_to_text
from krea_runner.model import Attempt, AttemptKey, Gang, JobRecord, JobState, RunConfig
from krea_runner.observe import heartbeats
from krea_runner.observe.follow import Log, follow
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.observe.snapshot import observe
from krea_runner.rundir import RunDir
from krea_runner.supervise.supervisor import Supervisor
from krea_runner.supervise.tick import tick

KEY = AttemptKey("1")
JOB = JobRecord("1", JobState.RUNNING, "RUNNING", "None", 0, started_at=1.0, nodelist="n[1-2]", requeue_allowed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 2048), ("ranks", 8), ("times", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--peak", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(Path(options.peak))
        return
    gc.set_threshold(COLLECT_AFTER)  # as `krea-runner supervise` does
    with tempfile.TemporaryDirectory(prefix="krea-bench-", dir=options.folder) as name:
        gang = Gang(options.nodes, options.ranks)
        config = RunConfig(
            name="llm", slug="llm", run_dir=Path(name) / "run", command=("true",), workdir=Path(name), gang=gang
        )
        looks(config, options.times)
        ticks(config, Path(name), options.times)
        logs(config, Path(name), options.times)


def write_beats(config: RunConfig, beat: int) -> Path:
    """As the ranks write them: in place, so that the files stay the same ones."""
    folder = RunDir(config.run_dir).heartbeats(KEY)
    folder.mkdir(parents=True, exist_ok=True)
    for node in range(config.gang.nodes):
        lines = b""
        for local in range(config.gang.ranks_per_node):
            body = (
                f"{FORMAT} rank={node * config.gang.ranks_per_node + local} local={local} attempt={KEY} beat={beat} "
                f"flush={3 * beat} step={beat} phase=step budget=- pid=123456 at={1_800_000_000 + beat}.000"
            )
            padded = body.ljust(SLOT - 14).encode()
            lines += padded + b" crc=%08x\n" % zlib.crc32(padded)
        descriptor = os.open(folder / f"gpu-node-{node:05d}.hb", os.O_WRONLY | os.O_CREAT)
        os.pwrite(descriptor, lines, 0)
        os.close(descriptor)
    return folder


def by_turns(
    calls: dict[str, Callable[[], object]], times: int, before: Callable[[], object]
) -> dict[str, list[float]]:
    """CPU milliseconds of each call, the kernel's included: others work on this machine too. `before` each round is free."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(times):
        before()
        for name, call in calls.items():
            started = time.process_time()
            call()
            spent[name].append((time.process_time() - started) * 1000)
    return spent


def looks(config: RunConfig, times: int) -> None:
    beat = 0

    def all_beat() -> None:
        nonlocal beat
        beat += 1
        write_beats(config, beat)
        read_heartbeats(folder, str(KEY))  # warm: it knows the files as they are
        beat += 1
        write_beats(config, beat)

    folder = write_beats(config, 0)
    calls: dict[str, Callable[[], object]] = {
        "rival: bare `os.open`, `os.read`, `os.close`": lambda: bare_os(folder),
        "rival: bare `open(path, 'rb')`, `read`, `close`": lambda: bare_python(folder),
        "one look, every slot has changed": lambda: read_heartbeats(folder, str(KEY)),
        "the next look, nothing has changed": lambda: read_heartbeats(folder, str(KEY)),
        "one look of a new process": lambda: (heartbeats._SEEN.clear(), read_heartbeats(folder, str(KEY))),
    }
    spent = by_turns(calls, times, all_beat)
    rival = statistics.median(spent["rival: bare `open(path, 'rb')`, `read`, `close`"])
    print(
        f"\n| {config.gang.world_size} ranks, {config.gang.nodes} files | CPU ms, min | CPU ms, median | times `open`, median |"
    )
    print("|---|---|---|---|")
    for name, values in spent.items():
        middle = statistics.median(values)
        print(f"| {name} | {min(values):.0f} | {middle:.0f} | {middle / rival:.1f} |")
    argv = [sys.executable, "-m", "tests.bench.bench_observe", "--peak", str(folder)]
    print("\n" + subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip())


def bare_os(folder: Path) -> None:
    for name in os.listdir(folder):
        descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
        os.read(descriptor, 65536)
        os.close(descriptor)


def bare_python(folder: Path) -> None:
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", "rb") as file:
            file.read()


def peak(folder: Path) -> None:
    before = peak_mb()
    reading = read_heartbeats(folder, str(KEY))
    print(
        f"Peak of a process that looks once at {len(reading.ranks)} ranks: {peak_mb()} MB ({before} MB before the look)."
    )


def peak_mb() -> int:
    """Of this program alone: ru_maxrss begins with what its parent had (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


class Says:
    """A scheduler that says one thing: what it costs to ask Slurm is measured by bench_controller."""

    name, whole_second_starts = "slurm", True

    def my_jobs(self, _known: object) -> dict[str, JobRecord]:
        return {"1": JOB}

    jobs = my_jobs


def ticks(config: RunConfig, folder: Path, times: int) -> None:
    history, clock = open_history(folder / "state"), SystemClock()
    run = history.create_run(config, user="root", tag="t", now=clock.wall())
    history.set_submitted(run.run_id, "1", now=clock.wall())
    says: Any = Says()
    loop = Supervisor(history, lambda _: says, clock, "root", "bench:1:1")
    beat = 1000

    def all_beat() -> None:
        nonlocal beat
        beat += 1
        write_beats(config, beat)

    def once() -> object:
        heartbeats._SEEN.clear()
        return tick(Supervisor(history, lambda _: says, clock, "root", "bench:1:1"))

    tick(loop)
    run = history.run(run.run_id)
    attempt: Attempt = history.attempts(run.run_id)[0]
    snapshot = observe(run, JOB, attempt, history.watch(attempt.attempt_id), clock)
    watch = snapshot.watch
    assert watch is not None
    text = watch_to_text(watch)
    calls: dict[str, Callable[[], object]] = {
        "one tick of the loop": lambda: tick(loop),
        "one tick of a new process (cron), without its imports": once,
        "of it: observe": lambda: observe(run, JOB, attempt, watch, clock),
        "of it: judge": lambda: judge_hang(snapshot),
        f"of it: the watch as text, {len(text) / 1e6:.1f} MB": lambda: watch_to_text(watch),
        "of it: the same put on record": lambda: history.save_observations((attempt, watch)),
        "of a new process only: the watch from its text": lambda: watch_from_text(text),
    }
    spent = by_turns(calls, times, all_beat)
    print(f"\n| one tick, {config.gang.world_size} ranks | CPU ms, min | CPU ms, median |\n|---|---|---|")
    for name, values in spent.items():
        print(f"| {name} | {min(values):.0f} | {statistics.median(values):.0f} |")


def logs(config: RunConfig, folder: Path, times: int) -> None:
    pattern = re.compile(r"\biteration\s+(?P<step>\d+)/\s*\d+ \|")
    noise = b"n1:704572:705272 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
    big = folder / "backlog.log"
    with big.open("wb") as file:
        file.truncate(10 << 30)
        file.seek(0, os.SEEK_END)
        file.write(noise * (4 << 20 // len(noise)))
    backlog = [Log(str(big), big.name, is_whole=True)]
    many = folder / "logs"
    many.mkdir()
    paths = [many / f"node-{node}.log" for node in range(config.gang.nodes)]
    known: dict[str, Any] = {}

    def all_write() -> None:
        for path in paths:
            with path.open("ab") as file:
                file.write(noise * 20)
        with paths[-1].open("ab") as file:
            file.write(b" iteration %8d/ 50000 | loss |\n" % len(known))

    def look_many() -> None:
        nonlocal known
        _, followed = follow("log", [Log(str(path), path.name, True) for path in paths], known, pattern)
        known = {log.name: log for log in followed}

    calls: dict[str, Callable[[], object]] = {
        f"rival: bare open, read, close of {len(paths)} logs": lambda: bare_python(many),
        f"{len(paths)} logs, each grown by {20 * len(noise)} bytes": look_many,
        f"{len(paths)} logs, none grown": look_many,
        "one log, a backlog of 10 GB without a progress line": lambda: follow("log", backlog, {}, pattern),
    }
    spent = by_turns(calls, times, all_write)
    print("\n| a look for progress lines | CPU ms, min | CPU ms, median |\n|---|---|---|")
    for name, values in spent.items():
        print(f"| {name} | {min(values):.0f} | {statistics.median(values):.0f} |")
    print(f"\nPeak of this process: {peak_mb()} MB.")


if __name__ == "__main__":
    main()
