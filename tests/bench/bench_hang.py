"""Hundreds of healthy hours and of hangs through the real detector, on a virtual clock. Prints two tables; asserts nothing.

    python -m tests.bench.bench_hang [--hours 4] [--seeds 1] [--first-seed 0]

The rivals' rules are run over the same healthy traces: no progress for 600 s, which is the default of PyTorch's NCCL watchdog, of
DLRover and (about) of Ray Train; five times the longest wait seen, which is nvidia-resiliency-ext's factor (it can also tell
phases apart, where they are declared to it).
"""

import argparse
import math
import os
import statistics
import tempfile
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from krea_runner.model import Snapshot
from krea_runner.model.learned import WARM_UP_STEPS
from tests.cases.traces.kinds import HANGS, HEALTHY, WATCHING
from tests.cases.traces.replay import healthy, hung

FIXED_S, TIMES = 600.0, 5.0
STAGES = {"within its first hour": 0.4, "later": 1.6, "second attempt": 0.4}


class Rivals:
    """Counts what the rivals' rules would have called a hang: once a silence."""

    def __init__(self) -> None:
        self.alarms: Counter[str] = Counter()
        self.longest_s, self.silent_s = 0.0, 0.0
        self.called: set[str] = set()

    def see(self, snapshot: Snapshot) -> None:
        watch = snapshot.watch
        if watch is None or not watch.ranks or watch.first_step is None:
            return
        silent_s = min(snapshot.mono - rank.beat_moved_mono for rank in watch.ranks)
        if silent_s < self.silent_s:
            self.longest_s, self.called = max(self.longest_s, self.silent_s), set()
        self.silent_s = silent_s
        warm = max(rank.step for rank in watch.ranks) - watch.first_step > WARM_UP_STEPS
        limits = {"600 s": FIXED_S, "5 times the longest": TIMES * max(self.longest_s, 1.0) if warm else math.inf}
        for name, limit_s in limits.items():
            if silent_s > limit_s and name not in self.called:
                self.called.add(name)
                self.alarms[name] += 1


def one_healthy(kind: str, watching: str, seed: int, hours: float) -> tuple[str, float, str, Counter[str], bool]:
    rivals = Rivals()
    with tempfile.TemporaryDirectory() as folder:
        number = zlib.crc32(f"{kind} {watching} {seed}".encode())
        outcome = healthy(HEALTHY[kind], WATCHING[watching], number, hours, Path(folder) / "run", rivals.see)
    killed = "" if outcome.killed is None else f"{watching}: {outcome.killed.summary} ({outcome.killed.agreed_by})"
    return kind, outcome.hours, killed, rivals.alarms, bool(outcome.slow_lines)


def one_hung(kind: str, watching: str, seed: int, stage: str) -> tuple[str, str, float | None, bool, str]:
    hang, how, number = HANGS[kind], WATCHING[watching], zlib.crc32(f"{kind} {watching} {stage} {seed}".encode())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        memory = healthy(hang.shape, how, number + 9, 1.6, place).watch if stage == "second attempt" else None
        outcome = hung(hang, how, number, STAGES[stage], place, memory)
    told = outcome.killed.cause if outcome.killed is not None else "missed"
    return kind, stage, outcome.noticed_s, told == hang.cause, f"{watching}, {stage}: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=4.0, help="of each healthy kind under each way of watching")
    parser.add_argument("--seeds", type=int, default=1, help="traces of each kind and way of watching")
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        good = [
            pool.submit(one_healthy, kind, how, seed, args.hours)
            for kind in HEALTHY for how in WATCHING for seed in range(args.first_seed, args.first_seed + args.seeds)
        ]  # fmt: skip
        bad = [
            pool.submit(one_hung, kind, how, seed, stage)
            for kind in HANGS for how in WATCHING for stage in STAGES
            for seed in range(args.first_seed, args.first_seed + args.seeds)
        ]  # fmt: skip
        print_healthy([future.result() for future in good])
        print_hangs([future.result() for future in bad])


def print_healthy(outcomes: list[tuple[str, float, str, Counter[str], bool]]) -> None:
    print("| healthy runs | hours | false alarms | rule: 600 s | rule: 5 times the longest seen | called slow |")
    print("|---|---|---|---|---|---|")
    for kind in [*HEALTHY, "all"]:
        rows = [row for row in outcomes if kind in (row[0], "all")]
        alarms = sum((row[3] for row in rows), Counter())
        print(
            f"| {kind} | {sum(row[1] for row in rows):.0f} | {sum(bool(row[2]) for row in rows)} | {alarms['600 s']} "
            f"| {alarms['5 times the longest']} | {sum(row[4] for row in rows)} of {len(rows)} |"
        )
    for row in outcomes:
        if row[2]:
            print(f"FALSE ALARM {row[0]}, {row[2]}")


def print_hangs(outcomes: list[tuple[str, str, float | None, bool, str]]) -> None:
    heads = " | ".join(f"{stage}: median | p95" for stage in STAGES)
    print(f"\n| hangs, seconds until noticed | n | missed | cause told | {heads} |")
    print("|---" * (4 + 2 * len(STAGES)) + "|")
    for kind in [*HANGS, "all"]:
        rows = [row for row in outcomes if kind in (row[0], "all")]
        times: defaultdict[str, list[float]] = defaultdict(list)
        for _, stage, noticed_s, _, _ in rows:
            if noticed_s is not None:
                times[stage].append(noticed_s)
        cells = " | ".join(
            f"{statistics.median(times[stage]):.0f} | {quantile(times[stage], 0.95):.0f}" if times[stage] else "- | -"
            for stage in STAGES
        )
        missed, told = sum(row[2] is None for row in rows), sum(row[3] for row in rows)
        print(f"| {kind} | {len(rows)} | {missed} | {told} | {cells} |")
    for row in outcomes:
        if row[2] is None or not row[3]:
            print(f"OTHER CAUSE {row[0]}, {row[4]}")


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


if __name__ == "__main__":
    main()
