"""Write down what a real Slurm says, for the tests that run without one.

    python -m tests.recordings.record [jobs] [refusals] [controller] [accounting]

On clusters made for it, of any Debian release: `python -m tests.recordings trixie sid` (__main__.py).

Runs as root against the cluster of $SLURM_CONF, in the checkout's root folder, and rewrites the files of the named groups
(all of them by default) in tests/recordings/slurm-VERSION/. It submits jobs, stops and kills the controller and slurmdbd
and starts them again, so it refuses any cluster whose controller does not keep its pid file beside slurm.conf, as a
throw-away cluster does. The group `accounting` needs slurmdbd; what says that there is none, needs none: run it on one
cluster of each kind. The cluster's folder becomes /cluster and the host's name `ctl` in what is written.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from krea_runner.proc import Completed, run
from krea_runner.schedulers import slurm_cli as slurm
from krea_runner.schedulers.slurm_parse import parse_config

from . import FOLDER

CONF = Path(os.environ["SLURM_CONF"])
TAG = "krea_runner/0123456789abcdef"
NOBODY = ["runuser", "-u", "nobody", "--", "env", f"SLURM_CONF={CONF}"]
UNKNOWN = "99999"
NO_ACCOUNTING = ("accounting_storage/none", "(null)")  # the second from 24.11 on


def say(*argv: str) -> str:
    done = run(argv, timeout_s=60)
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)}: {done.stderr}")
    return done.stdout.strip()


def write(case: str, done: Completed, jobs: Mapping[str, str] | None = None, hide: str = "") -> None:
    def scrub(text: str) -> str:
        for secret, word in ((hide, "/cluster"), (str(CONF.parent), "/cluster")):
            text = text.replace(secret, word) if secret else text
        return re.sub(rf"\b{re.escape(socket.gethostname().split('.')[0])}\b", "ctl", text)

    version = say("sbatch", "--version").split()[-1]
    path = FOLDER / f"slurm-{version}" / f"{case}.json"
    path.parent.mkdir(exist_ok=True)
    argv = [scrub(word) for word in done.argv if word not in NOBODY]
    path.write_text(
        json.dumps(
            {
                "argv": argv,
                "returncode": done.returncode,
                "stdout": scrub(done.stdout),
                "stderr": scrub(done.stderr),
                "jobs": dict(jobs or {}),
            },
            indent=2,
        )
        + "\n"
    )
    print(f"{case}: exit {done.returncode}, {len(done.stdout)} + {len(done.stderr)} characters")


def record(case: str, argv: Sequence[str], jobs: Mapping[str, str] | None = None) -> None:
    write(case, run(argv, timeout_s=60), jobs)


def submit(command: str, *options: str) -> str:
    return say("sbatch", "--parsable", "-o", "/dev/null", "-n1", *options, f"--wrap={command}")


def wait(job_id: str, state: str) -> None:
    deadline = time.monotonic() + 60
    while state not in (seen := say("squeue", "-a", "-h", "-t", "all", "-j", f"{job_id},{job_id}", "-o", "%T")):
        if time.monotonic() > deadline:
            sys.exit(f"job {job_id} is {seen}, not {state}")
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------------- jobs


def jobs() -> None:
    ids = {
        "completed": submit("true"),
        "failed": submit("exit 7"),
        "killed": submit("kill -9 $$"),
        "cancelled": submit("sleep 600"),
        "running": submit("sleep 600"),
        "requeued": submit("sleep 600"),
        "held": submit("sleep 600", "-H", f"--comment={TAG}"),
        "no_requeue": submit("sleep 600", "--no-requeue", "--comment=bars | and\nline breaks"),
        "array": submit("sleep 600", "--array=1-3%1"),
        "het": say("sbatch", "--parsable", "-o", "/dev/null", "-n1", ":", "-n1", "--wrap=sleep 600"),
    }
    for name in ("cancelled", "running", "requeued", "no_requeue", "array", "het"):
        wait(ids[name], "RUNNING")
    say("scancel", ids["cancelled"])
    say("scontrol", "requeue", ids["requeued"])
    ends = {"completed": "COMPLETED", "failed": "FAILED", "killed": "FAILED", "cancelled": "CANCELLED"}
    for name, state in (ends | {"requeued": "PENDING"}).items():
        wait(ids[name], state)
    record("squeue-jobs", slurm.squeue_argv(list(ids.values())), ids)
    record("squeue-mine", slurm.my_jobs_argv(everybody=False), ids)
    record("squeue-unknown", slurm.squeue_argv([UNKNOWN]))
    record("squeue-unknown_alone", ["squeue", "-h", "-j", UNKNOWN])
    record("squeue-bad_format", [*slurm.squeue_argv([ids["running"]])[:-1], "Nope:|,JobID:|"])
    record("squeue-bad_format_no_jobs", [*slurm.squeue_argv([UNKNOWN])[:-1], "Nope:|,JobID:|"])
    say("scancel", *ids.values())


# ------------------------------------------------------------------------------------------------------------ refusals


def refusals() -> None:
    running = submit("sleep 600")
    fixed, held = submit("sleep 600", "--no-requeue"), submit("sleep 600", "-H")
    wait(running, "RUNNING")
    wait(fixed, "RUNNING")
    with tempfile.TemporaryDirectory() as folder:
        for case, option in {
            "bad_partition": "--partition=nope",
            "bad_option": "--nope",
            "bad_gres": "--gres=gpu:1",
            "accepted": "--time=1",
        }.items():
            script = write_script(folder, option)
            write(f"sbatch-{case}", run(slurm.sbatch_argv(script, TAG), timeout_s=60), hide=folder)
        no_munge = Path(folder) / "slurm.conf"
        no_munge.write_text(re.sub(r"(?m)^AuthInfo=.*$", "AuthInfo=socket=/cluster/none", CONF.read_text()))
        for case, argv in {"squeue": slurm.squeue_argv([running]), "sbatch": slurm.sbatch_argv(script, TAG)}.items():
            done = run(["env", f"SLURM_CONF={no_munge}", *argv], timeout_s=60)
            write(f"{case}-no_munge", done, hide=folder)
    record("scontrol-requeue_unknown", slurm.requeue_argv(UNKNOWN))
    record("scontrol-requeue_pending", slurm.requeue_argv(held))
    record("scontrol-requeue_disabled", slurm.requeue_argv(fixed))
    record("scontrol-requeue_denied", [*NOBODY, *slurm.requeue_argv(running)])
    record("scontrol-update_unknown", slurm.start_now_argv(UNKNOWN))
    record("scontrol-update_denied", [*NOBODY, *slurm.start_now_argv(held)])
    record("scancel-unknown", slurm.cancel_argv(UNKNOWN))
    record("scancel-denied", [*NOBODY, *slurm.cancel_argv(running)])
    say("scancel", running, fixed, held)


def write_script(folder: str, option: str) -> Path:
    script = Path(folder) / "job.sbatch"
    script.write_text(f"#!/bin/sh\n#SBATCH -o /dev/null {option}\ntrue\n")
    return script


# ---------------------------------------------------------------------------------------------------------- controller


@contextmanager
def without(daemon: str, pid_file: Path, stop: signal.Signals, start: Callable[[], object]) -> Iterator[None]:
    os.kill(int(pid_file.read_text()), stop)
    try:
        yield
    finally:
        start()
    print(f"{daemon} is back")


def controller() -> None:
    running = submit("sleep 600")
    wait(running, "RUNNING")
    record("scontrol-ping_up", ["scontrol", "ping"])
    record("scontrol-config", ["scontrol", "show", "config"])
    record("sinfo-partitions", ["sinfo", "-h", "-o", "%R %a, nodes busy/idle/other/all %F"])
    pid_file = CONF.parent / "run" / "slurmctld.pid"
    pid = int(pid_file.read_text())
    with ThreadPoolExecutor(6) as pool, tempfile.TemporaryDirectory() as folder:  # each of them waits for ten seconds
        asked = {
            "scontrol-ping": ["scontrol", "ping"],
            "squeue": slurm.squeue_argv([running]),
            "scontrol-requeue": slurm.requeue_argv(running),
            "scontrol-update": slurm.start_now_argv(running),
            "scancel": slurm.cancel_argv(running),
            "sbatch": slurm.sbatch_argv(write_script(folder, ""), TAG),
        }

        def ask_all(end: str) -> None:
            for case, done in zip(asked, pool.map(lambda argv: run(argv, timeout_s=60), asked.values()), strict=True):
                name = f"{case}_{end}" if "-" in case else f"{case}-{end}"
                write(name, done, hide=folder)

        with without("slurmctld", pid_file, signal.SIGSTOP, lambda: os.kill(pid, signal.SIGCONT)):
            ask_all("controller_stopped")
        with without("slurmctld", pid_file, signal.SIGKILL, lambda: subprocess.run(["slurmctld"], check=True)):
            ask_all("controller_down")


# ---------------------------------------------------------------------------------------------------------- accounting


def accounting() -> None:
    if parse_config(say("scontrol", "show", "config"))["AccountingStorageType"] in NO_ACCOUNTING:
        record("sacct-disabled", slurm.sacct_argv(["1"]))
        return
    ids = {
        "completed": submit("true"),
        "failed": submit("exit 7"),
        "code_137": submit("exit 137"),
        "killed": submit("kill -9 $$"),
        "cancelled": submit("sleep 600"),
        "running": submit("sleep 600"),
        "restarted": submit("exit $((7 + 0$SLURM_RESTART_COUNT))"),
        "array": submit("true", "--array=1-2"),
        "het": say("sbatch", "--parsable", "-o", "/dev/null", "-n1", ":", "-n1", "--wrap=true"),
    }
    for name in ("cancelled", "running"):
        wait(ids[name], "RUNNING")
    say("scancel", ids["cancelled"])
    for _ in range(2):
        wait(ids["restarted"], "FAILED")
        say("scontrol", "requeue", ids["restarted"])
        wait(ids["restarted"], "PENDING")
        time.sleep(1.2)  # a start within the second of the requeue is refused
        say("scontrol", "update", f"jobid={ids['restarted']}", "StartTime=now")
    for name in ("completed", "failed", "code_137", "killed", "restarted"):
        wait(ids[name], "COMPLETED" if name == "completed" else "FAILED")
    argv = slurm.sacct_argv(list(ids.values()))
    while run(argv, timeout_s=60).stdout.count("FAILED") < 4:  # the controller writes to slurmdbd when it has time
        time.sleep(0.2)
    record("sacct-jobs", argv, ids)
    record("sacct-unknown", slurm.sacct_argv([UNKNOWN]))
    pid_file = CONF.parent / "run" / "slurmdbd.pid"
    with without("slurmdbd", pid_file, signal.SIGKILL, lambda: subprocess.run(["slurmdbd"], check=True)):
        record("sacct-slurmdbd_down", argv)
    say("scancel", *ids.values())


GROUPS = {group.__name__: group for group in (jobs, refusals, controller, accounting)}

if __name__ == "__main__":
    pid_file = Path(parse_config(say("scontrol", "show", "config"))["SlurmctldPidFile"])
    if CONF.parent not in pid_file.parents:
        sys.exit(f"{CONF} is not a throw-away cluster's: its controller keeps its pid in {pid_file}")
    for name in sys.argv[1:] or GROUPS:
        GROUPS[name]()
