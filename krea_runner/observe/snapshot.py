"""Reads the world of one run into one Snapshot. The only reader; it changes nothing."""

from dataclasses import replace
from functools import partial

from krea_runner.clock import Clock
from krea_runner.errors import FilesUnavailable
from krea_runner.model import (
    Attempt,
    CheckpointReading,
    HeartbeatReading,
    JobRecord,
    JobState,
    LogReading,
    Run,
    RunConfig,
    Snapshot,
    Watch,
)
from krea_runner.observe.answered import answered
from krea_runner.observe.checkpoints import read_checkpoints
from krea_runner.observe.heartbeats import read_heartbeats
from krea_runner.observe.logs import read_logs, read_script_end
from krea_runner.observe.progress import advance_sources, read_sources
from krea_runner.observe.watch import advance_watch
from krea_runner.rundir import RunDir
from krea_runner.transport.mirror import mirrored

# A queued, starting or suspended gang owes no beats: its clocks start afresh when it runs (again).
_TICKING = frozenset({JobState.RUNNING, JobState.COMPLETING})


def observe(run: Run, job: JobRecord | None, attempt: Attempt | None, memory: Watch | None, clock: Clock) -> Snapshot:
    """`memory` is what the last look at this attempt left behind; the snapshot's `watch` is what this one leaves.

    Raises: FilesUnavailable, where files are read over SFTP, or their file system does not answer. Without an answer from that
    of the checkpoints alone, they are not known.
    """
    config = mirrored(run.config, attempt.key if attempt else None)
    checkpoints = _checkpoints(run.config, config)
    if attempt is None:
        return Snapshot(run=run, wall_at=clock.wall(), mono=clock.mono(), job=job, checkpoints=checkpoints)
    read = partial(_snapshot, run, config, job, attempt, checkpoints, memory, clock)
    return answered(config, config.run_dir, read)


def _checkpoints(named: RunConfig, config: RunConfig) -> CheckpointReading:
    """`config`: with its directories where they can be read; the result has them as the job calls them."""
    directory = config.checkpoint.directory
    if directory is None or named.checkpoint.directory is None:
        return CheckpointReading()
    try:
        found = answered(config, directory, partial(read_checkpoints, config.checkpoint))
    except FilesUnavailable as error:
        return CheckpointReading(problems=(f"checkpoints: {error}",))
    if found.newest is None:
        return found
    return replace(found, newest=replace(found.newest, path=named.checkpoint.directory / found.newest.path.name))


def _snapshot(
    run: Run,
    config: RunConfig,
    job: JobRecord | None,
    attempt: Attempt,
    checkpoints: CheckpointReading,
    memory: Watch | None,
    clock: Clock,
) -> Snapshot:
    """What is below the run directory, and the log of an adopted job. On a thread: it touches no state but its own."""
    wall, mono = clock.wall(), clock.mono()
    run_dir = RunDir(config.run_dir)
    heartbeats = read_heartbeats(run_dir.heartbeats(attempt.key), str(attempt.key))
    log = read_logs(run_dir, attempt.key, run.config.job_log)
    watch = (
        _watch(run, attempt, memory, heartbeats, log, clock.epoch_id(), mono, wall) if _counts(job, attempt) else None
    )
    return Snapshot(
        run=run,
        wall_at=wall,
        mono=mono,
        job=job,
        attempt=attempt,
        watch=watch and _with_sources(watch, memory, config, attempt, checkpoints, mono),
        heartbeats=heartbeats,
        checkpoints=checkpoints,
        log=log,
        script_end=read_script_end(run_dir, attempt.key),
    )


def _counts(job: JobRecord | None, attempt: Attempt) -> bool:
    if job is None:  # forgotten by the scheduler: its ranks may still be there
        return attempt.started_at is not None and attempt.ended_at is None
    return job.state in _TICKING or job.state.is_ended


def _watch(
    run: Run,
    attempt: Attempt,
    memory: Watch | None,
    heartbeats: HeartbeatReading,
    log: LogReading,
    epoch_id: str,
    mono: float,
    wall: float,
) -> Watch:
    # A log that could not be read has not changed its size.
    size = memory.log_size_bytes if log.problems and memory is not None else log.size_bytes
    return advance_watch(
        memory,
        heartbeats,
        attempt=str(attempt.key),
        log_size_bytes=size,
        epoch_id=epoch_id,
        mono=mono,
        wall=wall,
        budgets=run.config.budgets,
    )


def _with_sources(
    watch: Watch, memory: Watch | None, config: RunConfig, attempt: Attempt, checkpoints: CheckpointReading, mono: float
) -> Watch:
    """`config`: with its directories where they can be read. The memory of another attempt, host or boot is none."""
    if memory is not None and (memory.attempt, memory.epoch_id) != (watch.attempt, watch.epoch_id):
        memory = None
    readings, followed = read_sources(
        RunDir(config.run_dir), attempt.key, config.progress, (config.checkpoint, checkpoints), config.job_log, memory
    )
    unwatched_s = watch.since_mono - memory.since_mono if memory is not None else 0.0
    sources = advance_sources(memory.sources if memory else (), readings, mono, unwatched_s)
    return replace(watch, sources=sources, followed=followed)
