"""Looks at how running gangs save, and tells once what a person should look at before work is lost."""

from dataclasses import replace

from krea_runner.decide.saving import FROM_NOTHING, KINDS, from_nothing, saving_troubles
from krea_runner.history.warnings import settle_warnings
from krea_runner.model import JobState, Saves, Snapshot
from krea_runner.observe.checkpoints.newest import whole_checkpoints
from krea_runner.observe.checkpoints.saves import read_saves
from krea_runner.observe.resumed import resumed_step
from krea_runner.rundir import RunDir
from krea_runner.supervise.supervisor import Supervisor

EVERY_S = 60.0


def saves_of(snapshot: Snapshot) -> Saves:
    """One look at the run's directory of checkpoints, where it can be seen from here."""
    config, job = snapshot.run.config, snapshot.job
    limit_at = job.limit_at if job is not None else None
    if config.files != "mounted":
        return Saves(limit_at=limit_at)
    return read_saves(config.checkpoint, snapshot.checkpoints, limit_at=limit_at)


def new_warnings(supervisor: Supervisor, snapshot: Snapshot) -> list[str]:
    """Puts the present episodes on record; returns what is new. A process looks once in EVERY_S at a run."""
    run, job, attempt = snapshot.run, snapshot.job, snapshot.attempt
    if job is None or attempt is None or job.state is not JobState.RUNNING or run.config.checkpoint.directory is None:
        return []
    looked_mono = supervisor.saves_looked_mono.get(run.run_id)
    if supervisor.dry_run or (looked_mono is not None and snapshot.mono - looked_mono < EVERY_S):
        return []
    supervisor.saves_looked_mono[run.run_id] = snapshot.mono
    saves = saves_of(snapshot)
    if run.config.slurm.get("signal"):  # it is told to save in time
        saves = replace(saves, limit_at=None)
    found = saving_troubles(saves, now=snapshot.wall_at, started_at=attempt.started_at)
    if attempt.first_step is not None and run.config.files == "mounted":
        steps = [one.step for one in whole_checkpoints(run.config.checkpoint, most=1000)]
        loaded = resumed_step(RunDir(run.config.run_dir), attempt.key)
        why = from_nothing(attempt, loaded, min(steps, default=None))
        found |= {FROM_NOTHING: why} if why else {}
    looked_for = {FROM_NOTHING} if saves.unseen or run.config.files != "mounted" else KINDS
    return settle_warnings(
        supervisor.history, run.run_id, str(attempt.key), found, looked_for=looked_for, now=snapshot.wall_at
    )
