"""Where the ranks of a job are, of one that runs or that accounting remembers: a job.json for `krea-runner diagnose`."""

import re
from collections.abc import Sequence
from typing import Any

from krea_runner.errors import JobNotFound, SchedulerError
from krea_runner.model import JobRecord
from krea_runner.schedulers.nodelist import expand
from krea_runner.schedulers.slurm_cli import SlurmCli, ask, checked_id
from krea_runner.schedulers.slurm_parse import unreadable

# JobID, tasks of a step, its nodes, what the job or step was given, how its tasks were laid out
SACCT = ("JobID", "NTasks", "NodeList", "AllocTRES", "Layout")
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")


def job_document(job_id: str) -> dict[str, Any]:
    """Nodes, tasks a node, GPUs a node, who starts the ranks, whether it still runs; what Slurm does not know is missing. Of a
    job whose steps are known its largest step is meant: the gang.

    Raises: JobNotFound, SchedulerUnavailable.
    """
    record = SlurmCli().jobs([job_id]).get(job_id)
    if record is None:
        raise JobNotFound(f"Slurm does not know job {job_id}", hint="give its nodes with --job job.json")
    tasks, gpus, nodelist, layout = _of_queue(job_id)
    accounted = _of_accounting(job_id)
    if accounted is not None and accounted[0]:
        tasks, gpus, nodelist, layout = accounted[0], accounted[1] or gpus, accounted[2] or nodelist, accounted[3]
    return laid_out(record, tasks, gpus, nodelist or record.nodelist, layout)


def laid_out(record: JobRecord, tasks: int, gpus: int, nodelist: str, layout: str) -> dict[str, Any]:
    """Ranks are only placed where that is one way: the same number of tasks on each node, in blocks (srun's default)."""
    nodes = expand(nodelist)
    document: dict[str, Any] = {"job_id": record.job_id, "nodes": nodes}
    if not record.state.is_queued:
        document["still_running"] = record.state.is_live
    if not nodes or not tasks:
        return document
    gpus_per_node = gpus // len(nodes) if gpus % len(nodes) == 0 else 0
    per_node, rest = divmod(tasks, len(nodes))
    is_block = layout in {"", "Unknown", "Block"}
    if per_node == 1 and rest == 0 and gpus_per_node > 1:  # a task a node starts a rank a GPU: torchrun
        return {**document, "launcher": "torchrun", "tasks_per_node": 1, "gpus_per_node": gpus_per_node}
    if per_node == 1 and rest == 0 and not gpus_per_node:  # a rank a node or an agent a node: nobody knows
        return document
    document |= {"launcher": "srun", "world_size": tasks}
    if rest == 0 and is_block:
        document |= {"tasks_per_node": per_node, "gpus_per_node": per_node}
    return document


def parse_steps(stdout: str, job_id: str) -> tuple[int, int, str, str] | None:
    """Tasks, GPUs, nodes and layout of the job's largest step, the last of those that are equal; from `sacct -P -n` with SACCT.
    None: accounting does not know the job.

    Raises: SchedulerOutputError.
    """
    best, gpus, known = (0, "", ""), 0, False
    for line in stdout.splitlines():
        values = line.split("|")
        if len(values) != len(SACCT):
            raise unreadable("sacct", line)
        name, tasks, nodelist, given, layout = values
        own, _, step = name.partition(".")
        if own != job_id:
            continue
        known = True
        if not step:
            gpus = max(gpus, _gpus(given))
        if step.isdigit() and tasks.isdigit() and int(tasks) >= best[0]:
            best = int(tasks), nodelist, layout
    return (best[0], gpus, best[1], best[2]) if known else None


def _of_queue(job_id: str) -> tuple[int, int, str, str]:
    """What was asked for; nothing once squeue has forgotten the job."""
    asked = checked_id(job_id)
    argv = ["squeue", "-a", "-h", "-t", "all", "-j", f"{asked},{asked}", "-O", "NumTasks:|,tres-alloc:|,NodeList:|"]
    try:
        rows = ask(argv, doing=f"asking for the tasks of job {job_id}").stdout.splitlines()
    except SchedulerError:
        return 0, 0, "", ""
    values: Sequence[str] = rows[0].split("|") if rows else ()
    if len(values) < 3:
        return 0, 0, "", ""
    tasks, given, nodelist = values[0], values[1], values[2]
    return int(tasks) if tasks.isdigit() else 0, _gpus(given), nodelist, ""


def _of_accounting(job_id: str) -> tuple[int, int, str, str] | None:
    """None also where there is no accounting: its refusal is not worth an error here."""
    argv = ["sacct", "-P", "-n", "-S", "1970-01-02", "-j", checked_id(job_id), f"--format={','.join(SACCT)}"]
    try:
        return parse_steps(ask(argv, doing=f"asking accounting for the steps of job {job_id}").stdout, job_id)
    except SchedulerError:
        return None


def _gpus(given: str) -> int:
    found = _GPUS.search(given)
    return int(found[1]) if found else 0
