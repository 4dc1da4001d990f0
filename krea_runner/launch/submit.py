"""From a configuration to a recorded run with a job: the run directory, what Slurm needs to find in it, the queue."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from krea_runner.clock import Clock
from krea_runner.errors import KreaRunnerError, SchedulerUnavailable
from krea_runner.history.store import History
from krea_runner.launch.render import render
from krea_runner.model import CheckpointReading, Run, RunConfig, RunState
from krea_runner.proc import packed
from krea_runner.rundir import RunDir
from krea_runner.schedulers import Scheduler
from krea_runner.supervise.exclude import Places, submit_elsewhere
from krea_runner.supervise.start_from import start_of
from krea_runner.transport.mirror import put_files


def submit(
    config: RunConfig,
    source: Path | bytes,
    *,
    history: History,
    scheduler: Scheduler,
    user: str,
    clock: Clock,
    tell: Callable[[str], None] = lambda _: None,
) -> Run:
    """Record the intent, prepare the directory, queue the job off the nodes that the user has excluded from all runs, record
    its id. `tell` is given what is to be said of those nodes, and of checkpoints that will not be loaded.

    Raises: HistoryError when the directory has a live run; SchedulerUnavailable when no answer came: the run stays
    SUBMITTING and the supervisor looks for its tag; any other KreaRunnerError: nothing was queued, the run is STOPPED.
    """
    tag = f"krea_runner/{uuid.uuid4().hex}"
    run = history.create_run(config, user=user, tag=tag, now=clock.wall())
    try:
        script = prepare(config, source)
        start = start_of(config, CheckpointReading(), now=clock.wall())
        job_id, off = submit_elsewhere(Places(scheduler, ()), run, script, "", history, clock.wall())
    except SchedulerUnavailable as error:
        error.hint = (
            "the job may exist all the same: do not submit again; `krea-runner supervise` finds it by its tag, "
            f"or give up with: krea-runner stop {run.run_id}"
        )
        raise
    except KreaRunnerError as error:
        history.set_run_state(run.run_id, RunState.STOPPED, f"not submitted: {error}", now=clock.wall())
        raise
    for said in filter(None, (off, start.note)):
        tell(said)
    if not history.set_submitted(run.run_id, job_id, now=clock.wall()):
        scheduler.cancel(job_id)
        raise KreaRunnerError(
            f"{run.name!r} was stopped while it was being submitted: job {job_id} is cancelled",
            hint=f"see that it ends: squeue -j {job_id}",
        )
    return history.run(run.run_id)


def prepare(config: RunConfig, source: Path | bytes) -> Path:
    """Make the run directory with a copy of `source` (the run.toml, or its text), the batch script and, for a submission from
    this host, the environment; returns the script's path.

    logs/ must exist before the job starts: Slurm fails a job whose output it cannot open (FAILED 0:53, 22.05.8).
    Raises: KreaRunnerError; ConfigError.
    """
    script = render(config)
    run_dir = RunDir(config.run_dir)
    if config.files == "sftp":
        folders = [run_dir.root, run_dir.logs, run_dir.events]
        text = source if isinstance(source, bytes) else source.read_bytes()
        put_files(config, folders, {run_dir.config: text, run_dir.script: script.encode()})
        return run_dir.script
    try:
        for folder in (run_dir.root, run_dir.logs, run_dir.events):
            folder.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            _write(run_dir.config, source)
        elif source.absolute() != run_dir.config:
            _write(run_dir.config, source.read_bytes())
        if config.transport == "local":
            _write(run_dir.environment, packed(os.environ))
        _write(run_dir.script, script.encode())
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise KreaRunnerError(
            f"preparing the run directory {run_dir.root}: {error.strerror}{where}",
            hint="name another place, on a file system that all nodes share: [run] dir",
        ) from error
    return run_dir.script


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, and for nobody else to read: [env] may hold keys."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
