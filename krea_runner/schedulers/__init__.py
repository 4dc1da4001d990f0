"""One seam to whatever runs jobs. `slurm_cli` and `local` pass the same contract tests (tests/contract/)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from krea_runner.errors import ConfigError
from krea_runner.model import SCHEDULERS, JobRecord

__all__ = ["Check", "Scheduler", "open_scheduler"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`. `hint` is what to type when it is not ok."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


class Scheduler(Protocol):
    """The calls, sorted by what a wrong answer costs.

    Reads. A wrong one kills a healthy run. They never turn "could not ask" into "not there":
    every read raises SchedulerUnavailable when the scheduler gave no answer in time, and SchedulerOutputError when it
    gave one that cannot be read; a line is never skipped.

    Writes. Exit 0 proves nothing: `scancel` of an unknown job, a requeue of a cancelled job and an update that will
    be lost all exit 0 (Slurm 22.05.8). Callers verify by a later read. A write that timed out may still be carried out
    when the controller comes back: SchedulerUnavailable from a write means "unknown", not "no".
    """

    name: str
    whole_second_starts: bool
    """A start within the same whole second as the kill before it is refused ("Job credential revoked") and the job
    ends FAILED: callers wait for the next second (Slurm; notes in docs/design/requeue.md)."""

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        """What the scheduler says now of each of these jobs, ended ones included; one call however many.

        A job that is absent from the answer is not known to the scheduler: purged, or never there.
        """

    def find_by_tag(self, tag: str) -> list[JobRecord]:
        """The caller's jobs submitted with `tag`, newest first; empty when the scheduler answered and knows none."""

    def submit(self, script: Path, *, tag: str) -> str:
        """Queue a batch script whose `#SBATCH` lines hold all options; returns the job id.

        Raises: SchedulerError when refused; SchedulerUnavailable when no answer came: the job may exist, look for its
        tag before trying again.
        """

    def requeue(self, job_id: str) -> None:
        """Kill what runs and put the job back in the queue under its id, restart count one higher.

        Works on ended jobs too, cancelled ones included: whether it should is the caller's business. The job is
        COMPLETING for a while and then PENDING with a start time some two minutes ahead.
        Raises: JobNotFound; SchedulerError when refused (already pending, requeue not allowed, not the owner).
        """

    def start_now(self, job_id: str) -> None:
        """Lift the start time of a PENDING job. Without effect while it is still COMPLETING (exit 0, lost)."""

    def cancel(self, job_id: str) -> None:
        """End a job, pending or running. An unknown job is no error."""

    def checks(self) -> list[Check]:
        """What `doctor` prints of this scheduler: found, answering, version, accounting, nodes. Never raises."""


def open_scheduler(kind: str, *, state_dir: Path) -> Scheduler:
    """`kind` as in run.toml, or `slurm@HOST`: Slurm's commands on that host over SSH. `state_dir` is where `local` keeps
    its jobs."""
    kind, _, ssh_host = kind.partition("@")
    if ssh_host and kind == "slurm":
        from krea_runner.schedulers.slurm_cli import SlurmCli
        from krea_runner.transport.ssh import open_ssh

        return SlurmCli(open_ssh(ssh_host))
    if kind == "slurm":
        from krea_runner.schedulers.slurm_cli import SlurmCli

        return SlurmCli()
    if kind == "local":
        from krea_runner.schedulers.local import LocalScheduler

        return LocalScheduler(state_dir / "local")
    raise ConfigError(f"scheduler {kind!r} does not exist", hint=f"use one of: {', '.join(SCHEDULERS)}")
