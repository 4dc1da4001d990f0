"""The shepherd of one local job: `python -m krea_runner.schedulers.local_job ROOT ID`. Puts itself into the background and
holds the job through its life: pending, running, ended, requeued. Sleeps in the kernel while nothing happens."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from krea_runner.model import JobState
from krea_runner.schedulers.local import REQUEUE_DELAY_S
from krea_runner.schedulers.local_state import (
    MARKER,
    LocalJob,
    identity,
    kill_marked,
    load,
    locked,
    save,
    shepherd_is_alive,
)

# Between TERM and KILL. Slurm's default is 30 s; on one's own machine nobody wants to wait for that.
KILL_WAIT_S = 3.0
_WAKERS = {signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_FOREVER_S = 3600.0


def main() -> None:
    root, job_id = Path(sys.argv[1]), sys.argv[2]
    home = root / "jobs" / job_id
    if os.fork():
        return
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKERS)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    with locked(home):
        job = load(home)
        if job.state.is_ended or (job.shepherd and shepherd_is_alive(job)):
            return
        job.shepherd = identity(os.getpid())
        save(home, job)
    while _wait_for_start(home):
        _run_attempt(home)
        if not _end_attempt(home):
            return


def _wait_for_start(home: Path) -> bool:
    """True once the job is RUNNING in the file; False when it was cancelled while pending."""
    while True:
        with locked(home):
            job = load(home)
            if job.want == "cancel":
                job.state, job.ended_at, job.want, job.signal = JobState.CANCELLED, time.time(), "", 0
                save(home, job)
                return False
            wait_s = job.eligible_at - time.time()
            if wait_s <= 0:
                job.state, job.reason, job.started_at = JobState.RUNNING, "None", time.time()
                save(home, job)
                return True
        signal.sigtimedwait(_WAKERS, min(wait_s, _FOREVER_S))


def _run_attempt(home: Path) -> None:
    """From the script's start until it has ended or must end; how it ended is left in the file."""
    job = load(home)
    try:
        process = _start(home, job)
    except OSError as error:
        _note(home, JobState.FAILED, reason=f"JobLaunchFailure: {error.strerror}", exit_code=1, signal=0)
        return
    deadline = None if job.time_limit_s is None else time.monotonic() + job.time_limit_s
    while process.poll() is None:
        if load(home).want:
            break
        left = _FOREVER_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            _note(home, JobState.TIMEOUT, reason="TimeLimit", exit_code=0, signal=int(signal.SIGTERM))
            break
        signal.sigtimedwait(_WAKERS, left)
    else:
        code = process.returncode
        if code == 0:
            _note(home, JobState.COMPLETED, reason="None", exit_code=0, signal=0)
        elif code > 0:
            _note(home, JobState.FAILED, reason="NonZeroExitCode", exit_code=code, signal=0)
        else:
            _note(home, JobState.FAILED, reason="JobLaunchFailure", exit_code=0, signal=-code)
    kill_marked(job.marker, patience_s=KILL_WAIT_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)


def _note(home: Path, state: JobState, *, reason: str, exit_code: int, signal: int) -> None:
    """The end, known but not yet over: processes are still being ended, so it reads COMPLETING."""
    with locked(home):
        job = load(home)
        job.state, job.reason = JobState.COMPLETING, reason
        job.exit_code, job.signal, job.ended_at = exit_code, signal, time.time()
        if not job.want:
            job.want = f"end:{state}"
        save(home, job)


def _end_attempt(home: Path) -> bool:
    """True when the job goes back to the queue."""
    with locked(home):
        job = load(home)
        again = job.want == "requeue"
        if again:
            job.back_to_queue(time.time() + REQUEUE_DELAY_S)
        elif job.want == "cancel":
            job.state, job.exit_code, job.signal, job.ended_at = JobState.CANCELLED, 0, int(signal.SIGTERM), time.time()
        else:
            job.state = JobState(job.want.removeprefix("end:"))
        job.want = ""
        save(home, job)
    return again


def _start(home: Path, job: LocalJob) -> subprocess.Popen[bytes]:
    script = home / "script"
    with script.open() as file:
        first = file.readline().strip()
    interpreter = shlex.split(first.removeprefix("#!")) if first.startswith("#!") else ["/bin/sh"]
    workdir = job.workdir if os.path.isdir(job.workdir) else "/tmp"  # noqa: S108 - as slurmstepd does (22.05.8)
    output = Path(workdir) / expand(job.output, job)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if job.append else os.O_TRUNC)
    descriptor = os.open(output, flags, 0o644)
    try:
        return subprocess.Popen(
            [*interpreter, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd=workdir,
            env=job.environment | _environment(job),
            start_new_session=True,
            preexec_fn=_unblock,  # noqa: PLW1509 - this process has one thread
        )
    finally:
        os.close(descriptor)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKERS)


def expand(pattern: str, job: LocalJob) -> str:
    """Slurm's file name pattern, as far as a batch script's own output knows it."""
    values = {"%%": "%", "%j": job.job_id, "%A": job.job_id, "%x": job.name, "%N": job.nodes[0]}
    out, rest = "", pattern
    while rest:
        two = rest[:2]
        out, rest = (out + values[two], rest[2:]) if two in values else (out + rest[0], rest[1:])
    return out


def _environment(job: LocalJob) -> dict[str, str]:
    nodes, tasks = len(job.nodes), len(job.nodes) * job.tasks_per_node
    per_node = str(job.tasks_per_node) + (f"(x{nodes})" if nodes > 1 else "")
    values = {
        "SLURM_CLUSTER_NAME": "local", "SLURM_JOB_ID": job.job_id, "SLURM_JOBID": job.job_id, "SLURM_JOB_NAME": job.name,
        "SLURM_JOB_NODELIST": job.nodelist, "SLURM_NODELIST": job.nodelist, "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes), "SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(job.tasks_per_node), "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_SUBMIT_DIR": job.workdir, "SLURMD_NODENAME": job.nodes[0], "SLURM_NODEID": "0", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", MARKER: job.marker,
        "PATH": f"{job.root}/bin:{job.environment.get('PATH', os.defpath)}",
    }  # fmt: skip
    if job.restart_count:  # unset on the first start (22.05.8)
        values["SLURM_RESTART_COUNT"] = str(job.restart_count)
    return values


if __name__ == "__main__":
    main()
