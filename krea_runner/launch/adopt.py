"""A job that somebody else's script submitted becomes a run of ours: nothing of it is changed, it is only looked after."""

import glob
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from krea_runner.clock import Clock
from krea_runner.config import check_run, slug_of
from krea_runner.errors import ConfigError, KreaRunnerError, SchedulerError
from krea_runner.history.store import History
from krea_runner.model import JobRecord, Run, RunConfig, RunState
from krea_runner.schedulers.slurm_describe import JobDescription, log_patterns

LIVE = (RunState.SUBMITTING, RunState.ACTIVE, RunState.HELD)
TAG = "krea_runner/"


@dataclass(frozen=True, slots=True)
class Given:
    """What a person said of the job; None: not said. Empty `checkpoint_dir`: it has none."""

    name: str | None = None
    run_dir: Path | None = None
    log: Path | None = None
    checkpoint_dir: str | None = None
    checkpoint_pattern: str | None = None
    checkpoint_complete: str | None = None
    mode: str | None = None
    progress: str | None = None
    progress_budget: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What Slurm does not know: `flag` is what answers it."""

    flag: str
    text: str
    field: str


def questions(job: JobDescription, record: JobRecord, given: Given, user: str) -> list[Question]:
    asked = []
    if given.log is None and log_of(job, record, user) is None:
        asked.append(Question("--log", "where does the job write its log (/dev/null: nowhere)?", "log"))
    if given.checkpoint_dir is None:
        text = "where are its checkpoints (empty: it has none)?"
        asked.append(Question("--checkpoint-dir", text, "checkpoint_dir"))
    return asked


def log_of(job: JobDescription, record: JobRecord, user: str) -> Path | None:
    """The job's standard output, when Slurm names it and, once the job runs, it is there."""
    names = log_patterns(job, user)
    if os.devnull in names:
        return None
    for name in names:
        found = glob.glob(name) if "*" in name else [name] if os.path.exists(name) else []
        if len(found) == 1:
            return Path(found[0])
    return Path(names[0]) if record.state.is_queued and "*" not in "".join(names) else None


def refuse(record: JobRecord, user: str, *, is_root: bool, has_script: bool = True) -> None:
    """Raises: SchedulerError with why this job cannot be looked after, and what to do instead."""
    job_id = record.job_id
    if record.user != user and not is_root:
        raise SchedulerError(
            f"job {job_id} is {record.user}'s: Slurm would let {user} neither requeue nor cancel it",
            hint=f"let {record.user} type: krea-runner adopt {job_id}",
        )
    if record.state.is_ended:
        raise SchedulerError(
            f"job {job_id} has ended already ({record.raw_state})",
            hint="submit it again, then adopt the new job",
        )
    if not (record.state.is_live or record.state.is_queued):
        raise SchedulerError(f"job {job_id} is {record.raw_state!r}, which says nothing we know")
    if not has_script:
        raise SchedulerError(
            f"job {job_id} has no batch script (salloc, srun): Slurm cannot start it again",
            hint="put what it runs into a script, then: sbatch SCRIPT; or: krea-runner submit RUN.TOML",
        )
    if record.comment.startswith(TAG):
        raise SchedulerError(
            f"job {job_id} carries krea_runner's tag, but no run here has it: it is looked after from another place",
            hint="find that state directory: export KREA_RUNNER_STATE_DIR=...; krea-runner status",
        )


def config_of(job: JobDescription, record: JobRecord, given: Given, user: str) -> RunConfig:
    """Raises: ConfigError where a value of Slurm's or of the person's cannot be used."""
    is_text = (
        job.workdir.isprintable() and "\ufffd" not in job.workdir
    )  # that is what stands for bytes that are no UTF-8
    if not is_text and given.run_dir is None:
        raise ConfigError(
            f"job {job.job_id} runs in {job.workdir!r}, which is no plain text: no run directory can be named below it",
            hint="name one, on a file system that all nodes share: --run-dir DIR",
        )
    name = given.name or (job.name.strip() if job.name.isprintable() else "") or f"job-{job.job_id}"
    command = job.command if job.command.isprintable() else ""
    workdir = job.workdir if is_text else str(given.run_dir)  # its script runs where Slurm runs it
    run: dict[str, Any] = {"name": name[:100], "command": command or "sbatch --wrap", "workdir": workdir}
    run["dir"] = str(given.run_dir.absolute() if given.run_dir else Path(job.workdir) / "runs" / slug_of(run["name"]))
    checkpoint = {
        key: value for key, value in (("dir", given.checkpoint_dir), ("pattern", given.checkpoint_pattern)) if value
    }
    if given.checkpoint_complete is not None:
        checkpoint["complete"] = given.checkpoint_complete
    tables: dict[str, Any] = {
        "run": run,
        "gang": {"nodes": job.nodes, "ranks_per_node": max(1, job.tasks // job.nodes)},
        "checkpoint": checkpoint,
        "policy": {"mode": given.mode} if given.mode else {},
        "progress": {
            key: value for key, value in (("pattern", given.progress), ("budget", given.progress_budget)) if value
        },
    }
    config = check_run(tables, Path(job.workdir), what=f"job {job.job_id}")
    log = given.log.absolute() if given.log else log_of(job, record, user)
    return replace(config, job_log=log)


def known_run(history: History, job_id: str, user: str) -> Run | None:
    """The live run that has this job already."""
    live = history.list_runs(user=user, states=LIVE)
    return next((run for run in live if (run.job_id, run.config.endpoint) == (job_id, "slurm")), None)


def adopt(config: RunConfig, job_id: str, *, history: History, user: str, clock: Clock) -> Run:
    """Record the run, ACTIVE from now on. Raises: KreaRunnerError; HistoryError when its directory has a live run."""
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KreaRunnerError(
            f"preparing the run directory {config.run_dir}: {error.strerror}",
            hint="name another place, on a file system that all nodes share: --run-dir DIR",
        ) from error
    run = history.create_run(config, user=user, tag=f"{TAG}{uuid.uuid4().hex}", now=clock.wall())
    history.set_submitted(run.run_id, job_id, now=clock.wall())
    history.set_run_state(run.run_id, RunState.ACTIVE, f"adopted job {job_id}", now=clock.wall())
    return history.run(run.run_id)
