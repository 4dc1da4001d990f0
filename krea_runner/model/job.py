"""Slurm's words: what a job is, and one start of it."""

from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """Slurm's job states and the flags its commands print in their place (job_state_codes, 22.05 to 26.05).

    A word that is not here becomes UNKNOWN (`JobRecord.raw_state` keeps it) and nothing is done about it.
    """

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"
    STAGE_OUT = "STAGE_OUT"
    SIGNALING = "SIGNALING"
    RESIZING = "RESIZING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @property
    def is_queued(self) -> bool:
        """Waiting to start, held or not."""
        return self in _QUEUED

    @property
    def is_live(self) -> bool:
        """Holds nodes: starting, running or ending."""
        return self in _LIVE

    @property
    def is_ended(self) -> bool:
        return self in _ENDED


_QUEUED = frozenset(map(JobState, "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD".split()))
_LIVE = frozenset(
    map(JobState, "CONFIGURING RUNNING SUSPENDED STOPPED COMPLETING STAGE_OUT SIGNALING RESIZING".split())
)
_ENDED = frozenset(
    map(
        JobState,
        "COMPLETED FAILED CANCELLED TIMEOUT DEADLINE NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL PREEMPTED "
        "OUT_OF_MEMORY REVOKED".split(),
    )
)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What the scheduler says of one job now. `None` means the scheduler gave no value."""

    job_id: str
    state: JobState
    raw_state: str
    reason: str = ""
    restart_count: int = 0
    exit_code: int | None = None
    signal: int | None = None
    submitted_at: float | None = None
    """Reset by Slurm at each requeue (22.05.8)."""
    started_at: float | None = None
    """For a pending job, when Slurm means to start it: 121 s ahead after a requeue."""
    ended_at: float | None = None
    limit_at: float | None = None
    """When its time limit ends it, of a running job."""
    nodelist: str = ""
    """Folded, as Slurm prints it; empty while pending."""
    batch_node: str = ""
    requeue_allowed: bool | None = None
    user: str = ""
    name: str = ""
    comment: str = ""  # where the run's tag is carried


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """One start of a job. `str()` is the name of its folders and what every observation carries."""

    job_id: str
    restart_count: int = 0
    relaunch: int = 0

    def __str__(self) -> str:
        base = f"{self.job_id}.r{self.restart_count}"
        return f"{base}.l{self.relaunch}" if self.relaunch else base
