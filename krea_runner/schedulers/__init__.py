"""One seam to whatever runs jobs. `slurm_cli`, `slurm_api` and `local` pass the same contract tests (tests/contract/)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from krea_runner.errors import ConfigError, SchedulerError
from krea_runner.model import SCHEDULERS, JobRecord
from krea_runner.proc import Completed, clean_environment, unpacked
from krea_runner.rundir import submit_environment

__all__ = ["DRAIN_PREFIX", "Check", "NodeRecord", "Placement", "Scheduler", "open_scheduler"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`. `hint` is what to type when it is not ok."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


# What a reason of ours starts with: only such a drain is ever ours to lift.
DRAIN_PREFIX = "krea: "
_OUT = frozenset(
    "DOWN DRAIN DRAINED DRAINING FAIL FAILING ERROR NOT_RESPONDING UNKNOWN FUTURE INVAL INVALID_REG".split()
)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the scheduler says of one node now. All text comes from operators: nothing of it is trusted."""

    name: str
    raw_state: str
    """All its flags, as Slurm prints them: `MIXED+DRAIN`, `DOWN*+DRAIN+NOT_RESPONDING`."""
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    gres: str = ""
    reservation: str = ""
    reason: str = ""
    reason_by: str = ""
    reason_at: float | None = None

    @property
    def is_out(self) -> bool:
        """No job starts there now, and not because the node is busy."""
        words = self.raw_state.split("+")
        return not _OUT.isdisjoint(word.rstrip("*~#!%$@^-") for word in words) or words[0].endswith("*")

    @property
    def is_reserved(self) -> bool:
        """Slurm 22.05 does not print the reservation's name."""
        return self.reservation != "" or not {"RESERVED", "MAINTENANCE"}.isdisjoint(self.raw_state.split("+"))

    @property
    def is_ours(self) -> bool:
        return self.reason.startswith(DRAIN_PREFIX)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job may run. Empty is: anywhere, as far as that goes."""

    partitions: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    """Its list of excluded nodes, whoever put them there."""
    required: tuple[str, ...] = ()
    """The nodes that it asks for by name: without one of them it never starts (BadConstraints)."""
    reservation: str = ""
    features: frozenset[str] = frozenset()
    """What its nodes must have, where that is a plain list of features."""

    def allows(self, node: NodeRecord) -> bool:
        return (
            (not self.partitions or not set(self.partitions).isdisjoint(node.partitions))
            and node.is_reserved == bool(self.reservation)
            and node.reservation in {"", self.reservation}
            and self.features.issubset(node.features)
        )


def environment_for(script: Path) -> dict[str, str]:
    """What the job of this script gets: what was set where the run was submitted, so that a supervisor's cron job does not give
    it its own; where that is not on record, the caller's.

    Raises: SchedulerError.
    """
    try:
        return unpacked(submit_environment(script).read_bytes(), os.environ)
    except FileNotFoundError:
        return clean_environment(os.environ)
    except OSError as error:
        raise SchedulerError(
            f"reading the environment of the submission, {submit_environment(script)}: {error.strerror}",
            hint="without the file the job gets the environment of whoever submits it",
        ) from error


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

    def my_jobs(self, known: Sequence[str]) -> dict[str, JobRecord]:
        """All the caller's jobs that the scheduler knows, ended ones included, and those of `known` that only its
        accounting remembers: what one tick asks, once, whatever the number of runs."""

    def starts(self, job_ids: Sequence[str]) -> dict[str, list[JobRecord]]:
        """Accounting's record of each start of these jobs, oldest first, `raw_state` with who cancelled it; empty where the
        cluster keeps none. One call however many; not to be asked of in a tick in which nothing has ended."""

    def submit(self, script: Path, *, tag: str, excluded: Sequence[str] = ()) -> str:
        """Queue a batch script whose `#SBATCH` lines hold all options; returns the job id. `excluded`, where there are any,
        takes the place of the script's own excluded nodes. The job's environment is that of `environment_for`.

        Raises: SchedulerError when refused; SchedulerUnavailable when no answer came: the job may exist, look for its
        tag before trying again.
        """

    def requeue(self, job_id: str) -> None:
        """Kill what runs and put the job back in the queue under its id, restart count one higher.

        Works on ended jobs too, cancelled ones included: whether it should is the caller's business. The job is
        COMPLETING for a while and then PENDING with a start time some two minutes ahead.
        Raises: JobNotFound; SchedulerError when refused (already pending, requeue not allowed, not the owner).
        """

    def release(self, job_id: str) -> None:
        """Let a held job wait for its start again; the start time of its requeue stays.

        Raises: JobNotFound; SchedulerError when refused.
        """

    def start_now(self, job_id: str, excluded: Sequence[str] | None = None) -> None:
        """Lift the start time of a PENDING job. Without effect while it is still COMPLETING (exit 0, lost).

        With `excluded`, in the same call, this becomes the job's whole list of excluded nodes.
        Raises: SchedulerError, with nothing changed, when a node is not known.
        """

    def cancel(self, job_id: str) -> None:
        """End a job, pending or running. An unknown job is no error."""

    def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeRecord]:
        """The nodes of that name, or all; one call however many. An absent one is not known to the scheduler."""

    def placements(self, job_ids: Sequence[str]) -> dict[str, Placement]:
        """Of those jobs that the scheduler knows; one call however many."""

    def exclude(self, job_id: str, names: Sequence[str]) -> None:
        """Add to the excluded nodes of a job that is PENDING, or COMPLETING after a requeue.

        Raises: JobNotFound; SchedulerError when the job runs, or a node is not known: nothing is changed then.
        """

    def drain(self, names: Sequence[str], reason: str) -> None:
        """Let no new job start there; `reason` is given our prefix. All of `names` or none.

        Raises: MayNotDrain; SchedulerError for a node that is not known, or out for somebody else's reason.
        """

    def undrain(self, names: Sequence[str]) -> None:
        """Raises: MayNotDrain; SchedulerError for a node that is not known, or whose reason does not carry our prefix."""

    def run_beside(
        self, job_id: str, nodes: Sequence[str], argv: Sequence[str], *, timeout_s: float, user: str = ""
    ) -> Completed:
        """Run `argv` once on each of `nodes` of a running job, beside its step and without disturbing it. Returns after
        `timeout_s` at most what was written until then, of all nodes together, and why it failed. Lines of up to 1024
        bytes stay whole. `user` is the job's owner.

        This and `end_beside` may be called on another thread than the rest. Raises: OSError; SchedulerUnavailable.
        """

    def end_beside(self, job_id: str) -> None:
        """End what a `run_beside` that took too long has left on the nodes. Never raises."""

    def checks(self) -> list[Check]:
        """What `doctor` prints of this scheduler: found, answering, version, accounting, nodes. Never raises."""


def refuse_others_drains(
    found: Mapping[str, NodeRecord], names: Sequence[str], doing: str, *, lifting: bool = False
) -> None:
    """The look before a drain is set, or with `lifting` ended. A reason counts while the node is out: from 25.11 on, a node
    keeps it when it is resumed.

    Raises: SchedulerError.
    """
    for name in names:
        node = found.get(name)
        if node is None:
            raise SchedulerError(f"{doing}: there is no node {name!r}", hint="the nodes: sinfo -N")
        if node.is_out and node.is_ours:
            continue
        if node.is_out and (node.reason or not lifting):
            by = f" by {node.reason_by}" if node.reason_by else ""
            said = "".join(c if c.isprintable() else "?" for c in node.reason)[:200]
            raise SchedulerError(
                f"{doing}: {name} is {node.raw_state}{by} for another reason, which stays: {said or '(none given)'}"
            )
        if lifting:
            raise SchedulerError(f"{doing}: {name} is {node.raw_state}, not drained by krea-runner")


def open_scheduler(kind: str, *, state_dir: Path) -> Scheduler:
    """`kind` as in run.toml, or `slurm@HOST`: Slurm's commands on that host over SSH. `state_dir` is where `local` keeps
    its jobs."""
    kind, _, ssh_host = kind.partition("@")
    if ssh_host and kind == "slurm":
        from krea_runner.schedulers.slurm_cli import SlurmCli
        from krea_runner.transport.ssh import open_ssh

        return SlurmCli(transport=open_ssh(ssh_host))
    if kind == "slurm":
        return _open_slurm()
    if kind == "local":
        from krea_runner.schedulers.local import LocalScheduler

        return LocalScheduler(state_dir / "local")
    raise ConfigError(f"scheduler {kind!r} does not exist", hint=f"use one of: {', '.join(SCHEDULERS)}")


def _open_slurm() -> Scheduler:
    """pyslurm is looked for, not imported: it lives in a process of its own."""
    if find_spec("pyslurm") is None:
        from krea_runner.schedulers.slurm_cli import SlurmCli

        return SlurmCli(Check("interface", True, "Slurm's commands: pyslurm is not installed (it need not be)"))
    from krea_runner.schedulers.slurm_api import open_api

    return open_api()
