"""How long from a stopped rank to the next step? Prints a Markdown table; asserts nothing.

    python -m tests.bench.bench_restart local --times 10
    scripts/dev-cluster shell -- python -m tests.bench.bench_restart slurm --times 10 [--plain 2]

A supervisor (`krea-runner supervise --every 5s`, as a process of its own) watches a run of 2 x 2 ranks; one rank is
SIGSTOPped again and again. `--plain` measures the rival in the same run: `scontrol requeue` alone, as watchdog scripts
have it, which waits for Slurm's own two minutes each time.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from krea_runner.config.site import state_dir
from krea_runner.history.store import open_history
from krea_runner.model import AttemptKey, RankBeat
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.rundir import RunDir

STEP_S = 0.5
EVERY_S = 5
POLL_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheduler", choices=["local", "slurm"])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--plain", type=int, default=0, metavar="N", help="repetitions of `scontrol requeue` alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="krea-bench-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        os.environ["KREA_RUNNER_STATE_DIR"] = str(Path(folder) / "state")
        bench(Path(folder), options)


def bench(folder: Path, options: argparse.Namespace) -> None:
    job_id = submit(folder, options.scheduler)
    run_dir = RunDir(folder / "run")
    rows: dict[str, list[float]] = {name: [] for name in ROWS}
    supervisor = subprocess.Popen([*KREA, "supervise", "--every", f"{EVERY_S}s"], stdout=sys.stderr)
    try:
        for restart in range(options.times):
            stopped_at = stop_a_rank(run_dir, AttemptKey(job_id, restart))
            started_at, stepped_at = see_start(run_dir, AttemptKey(job_id, restart + 1))
            noticed_at = open_history(state_dir()).incidents()[-1].noticed_at
            rows["SIGSTOP → noticed"].append(noticed_at - stopped_at)
            rows["decision → batch script runs"].append(started_at - noticed_at)
            rows["decision → first new step"].append(stepped_at - noticed_at)
            rows["SIGSTOP → first new step"].append(stepped_at - stopped_at)
    finally:
        supervisor.send_signal(signal.SIGINT)
        supervisor.wait()
    for restart in range(options.times, options.times + options.plain):
        stop_a_rank(run_dir, AttemptKey(job_id, restart))
        asked_at = time.time()
        subprocess.run(["scontrol", "requeue", job_id], check=True)
        started_at, stepped_at = see_start(run_dir, AttemptKey(job_id, restart + 1))
        rows["rival, `scontrol requeue` alone → batch script runs"].append(started_at - asked_at)
    subprocess.run([*KREA, "stop", "bench"], check=True, stdout=sys.stderr)
    report(rows, options.scheduler)


ROWS = (
    "SIGSTOP → noticed",
    "decision → batch script runs",
    "decision → first new step",
    "SIGSTOP → first new step",
    "rival, `scontrol requeue` alone → batch script runs",
)
KREA = [sys.executable, "-m", "krea_runner"]


def submit(folder: Path, scheduler: str) -> str:
    train = [sys.executable, "-m", "krea_runner.demo.train", "--steps", "1000000", "--checkpoint-every", "4"]
    (folder / "run.toml").write_text(
        f'[run]\nname = "bench"\nscheduler = "{scheduler}"\ndir = "run"\n'
        f"command = {json.dumps([*train, '--step-time', str(STEP_S)])}\n"
        "[gang]\nnodes = 2\nranks_per_node = 2\n"
        f'[budgets]\nstep = "{3 * STEP_S}s"\ncheckpoint = "{3 * STEP_S}s"\n'
        '[checkpoint]\ndir = "ckpt"\n[policy]\nmax_restarts = 10000\nno_progress_limit = 10000\n'
    )
    argv = [*KREA, "submit", str(folder / "run.toml"), "--json"]
    return str(json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)["job_id"])


def stop_a_rank(run_dir: RunDir, attempt: AttemptKey) -> float:
    """SIGSTOP a rank somewhere between two ticks, a few steps into the attempt; when."""
    wait_for_step(run_dir, attempt, min_steps=4)
    time.sleep(random.uniform(0, EVERY_S))
    victim = random.choice(beats(run_dir, attempt)[1:])
    os.kill(victim.pid, signal.SIGSTOP)
    return time.time()


def see_start(run_dir: RunDir, attempt: AttemptKey) -> tuple[float, float]:
    while not run_dir.script_events(attempt).exists():
        time.sleep(POLL_S)
    started_at = time.time()
    wait_for_step(run_dir, attempt, min_steps=0)
    return started_at, time.time()


def wait_for_step(run_dir: RunDir, attempt: AttemptKey, *, min_steps: int) -> None:
    first = None
    while True:
        steps = [beat.step for beat in beats(run_dir, attempt) if beat.step >= 0]
        if steps:
            first = max(steps) if first is None else first
            if max(steps) >= first + min_steps:
                return
        time.sleep(POLL_S)


def beats(run_dir: RunDir, attempt: AttemptKey) -> tuple[RankBeat, ...]:
    return read_heartbeats(run_dir.heartbeats(attempt), str(attempt)).ranks


def report(rows: dict[str, list[float]], scheduler: str) -> None:
    print(f"\n{scheduler}: 2 x 2 ranks, step {STEP_S} s, step budget {3 * STEP_S} s, supervise --every {EVERY_S}s\n")
    print("| seconds | n | min | median | max |\n|---|---|---|---|---|")
    for name, values in rows.items():
        if values:
            shown = (min(values), statistics.median(values), max(values))
            print(f"| {name} | {len(values)} | " + " | ".join(f"{value:.2f}" for value in shown) + " |")
    rival = rows[ROWS[4]]
    if rival:
        ratio = statistics.median(rival) / statistics.median(rows[ROWS[1]])
        print(f"\nrequeue with the start time lifted: {ratio:.0f} times sooner than `scontrol requeue` alone")


if __name__ == "__main__":
    main()
