"""What was concluded and done: findings, decisions, incidents, actions."""

from dataclasses import dataclass
from enum import StrEnum

from krea_runner.model.job import AttemptKey


class Symptom(StrEnum):
    """How a failure showed. Not what did it: that is `Finding.cause`."""

    HANG = "hang"
    CRASH = "crash"
    NODE_FAIL = "node_fail"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    REQUEUED_ELSEWHERE = "requeued_elsewhere"


@dataclass(frozen=True, slots=True)
class Suspect:
    kind: str
    """`rank` or `node`."""
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One failure of one attempt, as diagnosed: what is written down before anything is done about it."""

    symptom: Symptom
    cause: str
    """Coarse: a word such as `rank_stopped`, `rank_killed`, `exit_code`, `out_of_memory`, `unknown`."""
    summary: str
    """One line for a tired reader: what happened, which rank, on which node."""
    node: str = ""
    by: str = ""  # as Attempt.ended_by
    step: int | None = None
    last_progress_at: float | None = None
    evidence: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    agreed_by: str = ""
    """For a hang: the second signal, or why waiting longer was enough."""


class DecisionKind(StrEnum):
    WAIT = "WAIT"
    RELAUNCH = "RELAUNCH"
    REQUEUE = "REQUEUE"
    RESUBMIT = "RESUBMIT"
    HOLD = "HOLD"
    STOP = "STOP"
    DONE = "DONE"


@dataclass(frozen=True, slots=True)
class Decision:
    kind: DecisionKind
    reason: str


@dataclass(frozen=True, slots=True)
class Incident:
    """A Finding on record, with what was decided about it and what came of it. At most one an attempt."""

    incident_id: int
    run_id: int
    run_name: str
    attempt: AttemptKey
    finding: Finding
    noticed_at: float
    checkpoint_step: int | None
    """Newest whole checkpoint when the incident was noticed: where the next attempt should start."""
    decision: Decision
    restarted_at: float | None = None
    """When the next attempt was seen RUNNING."""
    resumed_at: float | None = None
    """When the next attempt's first step was seen."""
    resumed_step: int | None = None

    @property
    def lost_steps(self) -> int | None:
        if self.finding.step is None:
            return None
        return max(0, self.finding.step - (self.checkpoint_step or 0))

    @property
    def notice_s(self) -> float | None:
        """From the last sign of progress (or the end of the job) to the incident."""
        at = self.finding.last_progress_at
        return None if at is None else max(0.0, self.noticed_at - at)

    @property
    def resume_s(self) -> float | None:
        return None if self.resumed_at is None else self.resumed_at - self.noticed_at


class ActionKind(StrEnum):
    REQUEUE = "REQUEUE"
    RELEASE = "RELEASE"  # of a hold that Slurm put on the job; then as after a requeue
    START = "START"  # Slurm has requeued the job by itself: only its two minutes of waiting are lifted
    RESUBMIT = "RESUBMIT"  # the same script as a new job of the run
    CANCEL = "CANCEL"


class ActionStage(StrEnum):
    """How far an action has come, in order. Each is committed before the next effect is caused."""

    INTENDED = "INTENDED"
    REQUESTED = "REQUESTED"  # the scheduler took the request
    STARTED = "STARTED"  # the start time was lifted, or Slurm's own delay is left to run; a new job has its id
    DONE = "DONE"
    FAILED = "FAILED"

    @property
    def is_open(self) -> bool:
        return self not in {ActionStage.DONE, ActionStage.FAILED}


@dataclass(frozen=True, slots=True)
class Action:
    """One change asked of the scheduler. `restart_count` is the job's before the action: a higher one read later shows
    that the requeue took effect, whoever asked for it."""

    action_id: int
    run_id: int
    incident_id: int | None
    kind: ActionKind
    stage: ActionStage
    job_id: str
    restart_count: int
    reason: str
    created_at: float
    updated_at: float
    detail: str = ""
