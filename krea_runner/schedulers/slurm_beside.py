"""A second step on the nodes of a running job, beside the one that trains.

Measured on 22.05.8, 24.11.5 and 26.05.5, four nodes: `--overlap` starts in 0.1 to 0.3 s on nodes that the job fills, and neither
that step's exit codes nor its failed launch changes the job. A node whose slurmd does not answer keeps srun waiting for 10 s
(refused) to 20 s (silent); the tasks on the others start at once, and are killed when srun gives up. An srun that is killed
leaves its tasks running.
"""

import os
from collections.abc import Sequence

from krea_runner.errors import SchedulerError
from krea_runner.proc import Completed
from krea_runner.schedulers.nodelist import fold
from krea_runner.transport import HERE, Transport

STEP_NAME = "krea-evidence"
# scancel of a step waits for a dead node for 11 s (22.05.8).
ASK_S = 15.0


def beside_argv(job_id: str, nodes: Sequence[str], argv: Sequence[str], *, user: str = "") -> list[str]:
    """`user`: whose step it is to be, for root: Slurm lets nobody start one in another user's job, root neither."""
    count = str(len(nodes))
    return [
        *(["runuser", "-u", user, "--"] if user else []),
        "srun", f"--jobid={job_id}", "--overlap", "--immediate=5", f"--job-name={STEP_NAME}", "--chdir=/tmp", "--input=none",
        f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={fold(nodes)}", "--mem=0",
        "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", *argv,
    ]  # fmt: skip


def run_beside(
    transport: Transport, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float, user: str
) -> Completed:
    """Raises: OSError; SchedulerUnavailable."""
    other = user if transport is HERE and os.geteuid() == 0 and user not in {"", "root"} else ""
    return transport.run(beside_argv(job_id, nodes, argv, user=other), timeout_s=timeout_s)


def end_beside(transport: Transport, job_id: str) -> None:
    """End what an srun of ours that was killed left behind. What cannot be asked for is let be: what runs there ends itself."""
    try:
        told = transport.run(["squeue", "-s", "-h", "-j", job_id, "-O", "StepID:|,StepName:|"], timeout_s=ASK_S)
        for line in told.stdout.splitlines():
            step, _, name = line.rstrip("| ").partition("|")
            if name.strip() == STEP_NAME:
                transport.run(["scancel", "-s", "KILL", step.strip()], timeout_s=ASK_S)
    except (OSError, SchedulerError):
        return
