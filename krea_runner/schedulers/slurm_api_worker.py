"""The process that holds pyslurm: one JSON line in, one JSON line out. slurm_api starts it by this file's path.

A process of its own, because libslurm ends the process it is in when it finds no configuration (`fatal`), reads
slurm.conf once and never again, and holds Python's lock for as long as a controller is silent, so that no thread beside
it could keep a deadline (pyslurm 25.11.2).
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Of a whole array in one record, or of a task 0: pyslurm shows both alike, so neither has a name here.
UNNAMED = ""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    pyslurm: Any = importlib.import_module("pyslurm")
    print(json.dumps(_answer(pyslurm, {"do": "versions"})), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(pyslurm, json.loads(line))), file=answers, flush=True)


def _answer(pyslurm: Any, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": _VERBS[question.pop("do")](pyslurm, **question)}
    except pyslurm.RPCError as error:
        return {"errno": error.errno, "error": str(error)}


def _versions(pyslurm: Any) -> list[str]:
    return [pyslurm.__version__, pyslurm.slurmctld.Config.load().version]


def _jobs(pyslurm: Any, ids: list[str]) -> list[dict[str, Any]]:
    wanted = set(ids)
    named = ((_name(job), job) for job in pyslurm.Jobs.load().values())
    return [_record(name, job) for name, job in named if name in wanted]


def _mine(pyslurm: Any, uid: int) -> list[dict[str, Any]]:
    """For root, who may look after the jobs of others, everybody's."""
    return [_record(_name(job), job) for job in pyslurm.Jobs.load().values() if uid in {0, job.user_id}]


def _requeue(pyslurm: Any, job: int) -> None:
    pyslurm.Job(job).requeue()


def _start_now(pyslurm: Any, job: int) -> None:
    pyslurm.Job(job).modify(pyslurm.JobSubmitDescription(begin_time=int(time.time())))


def _name(job: Any) -> str:
    if job.array_id is not None:
        return f"{job.array_id}_{job.array_task_id}" if isinstance(job.array_task_id, int) else UNNAMED
    if job.heterogeneous_offset:
        return f"{job.heterogeneous_id}+{job.heterogeneous_offset}"
    return str(job.id)


def _text(job: Any, name: str) -> str | None:
    try:
        text: str | None = getattr(job, name)
    except UnicodeDecodeError:  # somebody else's bytes: ours are always UTF-8
        return None
    return text


def _record(name: str, job: Any) -> dict[str, Any]:
    return {
        "job_id": name,
        "raw_state": job.state,
        "reason": job.state_reason,
        "restart_count": job.requeue_count,
        "submitted_at": job.submit_time,
        "started_at": job.start_time,
        "nodelist": job.allocated_nodes,
        "batch_node": job.batch_host,
        "requeue_allowed": job.is_requeueable,
        "user": _text(job, "user_name"),
        "name": _text(job, "name"),
        "comment": _text(job, "comment"),
    }


_VERBS: dict[str, Callable[..., Any]] = {
    "versions": _versions,
    "jobs": _jobs,
    "mine": _mine,
    "requeue": _requeue,
    "start_now": _start_now,
}

if __name__ == "__main__":
    main()
