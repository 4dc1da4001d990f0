"""Runs and their attempts, as the history keeps them."""

from dataclasses import dataclass
from enum import StrEnum

from krea_runner.model.job import AttemptKey, JobState
from krea_runner.model.settings import RunConfig


class RunState(StrEnum):
    SUBMITTING = "SUBMITTING"  # intent is on record, the job id is not yet known
    ACTIVE = "ACTIVE"  # supervised
    HELD = "HELD"  # a person must look; left only by a person
    STOPPED = "STOPPED"  # a person ended it; for ever
    DONE = "DONE"

    @property
    def is_supervised(self) -> bool:
        return self in {RunState.SUBMITTING, RunState.ACTIVE}


@dataclass(frozen=True, slots=True)
class Run:
    run_id: int
    name: str
    user: str
    config: RunConfig
    state: RunState
    state_reason: str
    job_id: str | None
    tag: str
    """Unique per submission, carried by the job (Slurm: its comment), so that a lost answer can be found again."""
    created_at: float
    updated_at: float = 0.0
    """When the state last changed."""


@dataclass(frozen=True, slots=True)
class Attempt:
    attempt_id: int
    run_id: int
    key: AttemptKey
    first_seen_at: float
    submitted_at: float | None = None
    """Slurm's SubmitTime of this start: the same id and count at another time is another job (ids are used again)."""
    started_at: float | None = None
    ended_at: float | None = None
    end_state: JobState | None = None
    exit_code: int | None = None
    signal: int | None = None
    end_node: str = ""
    ended_by: str = ""
    """Who ended it: `job` itself, `slurm`, a user's name, `krea-runner`; empty while unknown."""
    nodelist: str = ""
    first_step: int | None = None
    last_step: int | None = None
