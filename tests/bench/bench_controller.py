"""What a tick costs the controller, with many jobs and many nodes defined. Prints a Markdown table; asserts nothing.

    python -m tests.bench.bench_controller [--jobs 1000] [--nodes 2000] [--runs 100] [--times 10] [--prefix DIR]

Brings up a cluster of its own (scripts/dev-cluster, as root), defines nodes that are not there, fills the queue with held
jobs and puts `--runs` of them under supervision; `--prefix`: of the Slurm that is installed there. The rivals ask as
watchdog scripts and requeue plugins do: one `squeue -j` a run, and `squeue --json`.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from krea_runner.clock import SystemClock
from krea_runner.history.store import History, open_history
from krea_runner.model import RunConfig
from krea_runner.proc import run
from krea_runner.schedulers import open_scheduler
from krea_runner.schedulers.slurm_api import SlurmApi
from krea_runner.schedulers.slurm_cli import SlurmCli, my_jobs_argv
from krea_runner.supervise.supervisor import Supervisor
from krea_runner.supervise.tick import tick
from tests.conftest import dev_cluster, free_ports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("jobs", 1000), ("nodes", 2000), ("runs", 100), ("times", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prefix", default="")
    options = parser.parse_args()
    prefix = ["--prefix", options.prefix] if options.prefix else []
    os.environ["PATH"] = f"{options.prefix}/bin:{options.prefix}/sbin:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="krea-bench-") as folder:
        Path(folder).chmod(0o755)
        where = ("--dir", f"{folder}/c")
        more = f"NodeName=m[1-{options.nodes}] NodeAddr=127.0.0.1 CPUs=128 RealMemory=1000000 State=DOWN"
        try:
            dev_cluster("up", *where, "--nodes", "2", "--port-base", str(free_ports()), "--conf", more, *prefix)
            os.environ["SLURM_CONF"] = f"{folder}/c/slurm.conf"
            measure(Path(folder), options)
        finally:
            dev_cluster("down", *where)


def measure(folder: Path, options: argparse.Namespace) -> None:
    history = open_history(folder / "state")
    job_ids = [fill(folder, history, number, supervised=number < options.runs) for number in range(options.jobs)]
    slurm, api = SlurmCli(), open_scheduler("slurm", state_dir=folder)
    supervisor = Supervisor(history, lambda _: slurm, SystemClock(), "root", "bench:1:1")
    rows: dict[str, Callable[[], object]] = {
        f"one tick of {options.runs} runs, all of it": lambda: tick(supervisor),
        "its one question of the controller, read": lambda: slurm.my_jobs([]),
        "the same, squeue alone": lambda: run(my_jobs_argv(everybody=False), timeout_s=60),
        **({"the same through pyslurm": lambda: api.my_jobs([])} if isinstance(api, SlurmApi) else {}),
        "rival: squeue --json": lambda: run(["squeue", "--json"], timeout_s=60),
        f"rival: squeue -j for each of {options.runs} runs": lambda: [
            run(["squeue", "-h", "-j", job_id, "-o", "%T"], timeout_s=60) for job_id in job_ids[: options.runs]
        ],
        "scontrol show node -o": lambda: run(["scontrol", "show", "node", "-o"], timeout_s=60),
        "sinfo -N": lambda: run(["sinfo", "-h", "-N", "-o", "%N|%T"], timeout_s=60),
    }
    print(f"| ms, {options.jobs} jobs in the queue, {options.nodes} nodes defined | min | median | max |")
    print("|---|---|---|---|")
    for name, call in rows.items():
        times = [timed(call) * 1000 for _ in range(options.times)]
        print(f"| {name} | {min(times):.0f} | {statistics.median(times):.0f} | {max(times):.0f} |")


def fill(folder: Path, history: History, number: int, *, supervised: bool) -> str:
    tag = f"krea_runner/bench{number}"
    done = run(["sbatch", "--parsable", "-H", "-o", "/dev/null", f"--comment={tag}", "--wrap=true"], timeout_s=60)
    job_id = done.stdout.strip()
    if supervised:
        config = RunConfig(
            name=f"r{number}", slug="wrap", run_dir=folder / str(number), command=("true",), workdir=folder
        )
        made = history.create_run(config, user="root", tag=tag, now=time.time())
        history.set_submitted(made.run_id, job_id, now=time.time())
    return job_id


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
