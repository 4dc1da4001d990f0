"""The records every layer shares. Frozen data, no I/O; times named `_at` are seconds since the epoch (UTC) unless they
are said to be monotonic."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

# ------------------------------------------------------------------------------------------------ Slurm's words


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


# ------------------------------------------------------------------------------------------------ configuration

SCHEDULERS = ("slurm", "local")


@dataclass(frozen=True, slots=True)
class Gang:
    """All nodes or none."""

    nodes: int = 1
    ranks_per_node: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long, in seconds, a rank may go without a beat in each phase. A budget given by the rank itself
    (`hb.phase(name, budget=...)`) wins; a phase that is not named here gets `default_s`."""

    startup_s: float = 1800.0
    step_s: float = 300.0
    checkpoint_s: float = 900.0
    evaluation_s: float = 1800.0
    shutdown_s: float = 600.0
    default_s: float = 900.0
    second_look: float = 2.0
    """Without a second signal that agrees, wait for this many times the budget."""

    def for_phase(self, phase: str) -> float:
        return float(getattr(self, f"{phase}_s", self.default_s))


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """`pattern` is the name of one checkpoint with `{step}` where the step number stands; `complete` is a file inside it
    that exists only once it is whole (empty: the entry's own name is enough, it was renamed into place)."""

    directory: Path | None = None
    pattern: str = "step_{step}"
    complete: str = "COMPLETE"


@dataclass(frozen=True, slots=True)
class Policy:
    mode: str = "act"
    """`observe` records and says what it would do; `act` does it."""
    max_restarts: int = 20
    window_s: float = 86400.0
    no_progress_limit: int = 2
    """Restarts in a row after the same failure that brought no newer complete checkpoint; then a person must look."""
    never_restart_exit_codes: tuple[int, ...] = (93,)
    """93 is what nvidia-resiliency-ext's launcher exits with when a restart makes no sense."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A validated run.toml. Paths are absolute."""

    name: str
    slug: str
    run_dir: Path
    command: tuple[str, ...] | str
    """A list is one argv; a string is a shell line the user wrote."""
    workdir: Path
    scheduler: str = "slurm"
    transport: str = "local"  # or "ssh": the scheduler's commands run on `ssh_host`
    ssh_host: str = ""
    files: str = "mounted"  # or "sftp": `run_dir` and the checkpoints are paths on `ssh_host`
    env: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gang: Gang = field(default_factory=Gang)
    slurm: MappingProxyType[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """sbatch options by their long names, with `_` for `-`, plus `extra`: list of whole options."""
    budgets: Budgets = field(default_factory=Budgets)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    policy: Policy = field(default_factory=Policy)
    job_log: Path | None = None
    """Of an adopted job, its own log: it has no batch script of ours, so no events and no heartbeats."""

    @property
    def endpoint(self) -> str:
        """`slurm`, `local`, or `slurm@login1`: runs of one endpoint are asked about in one question."""
        return f"{self.scheduler}@{self.ssh_host}" if self.transport == "ssh" else self.scheduler


# ------------------------------------------------------------------------------------------------ runs and attempts


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


# ------------------------------------------------------------------------------------------------ observations


@dataclass(frozen=True, slots=True)
class RankBeat:
    """One slot of a heartbeat file, as read."""

    rank: int
    local_rank: int
    node: str
    beat: int
    flush: int
    step: int
    """-1 until the first `hb.step(n)`."""
    phase: str
    phase_budget_s: float | None
    pid: int
    wall_at: float
    """The rank's own clock: for people, never for judging."""


@dataclass(frozen=True, slots=True)
class HeartbeatReading:
    """What one look at heartbeats/<attempt>/ gave. `problems` are the slots and files that could not be read, each
    one line that names the file and says why; they are not evidence of anything else."""

    ranks: tuple[RankBeat, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class CheckpointReading:
    """`newest` is the newest whole one; `incomplete` names the entries that are not, which nobody resumes from."""

    newest: Checkpoint | None = None
    incomplete: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogReading:
    size_bytes: int = 0
    """Of all logs of the attempt together: it grows, or the logs are silent."""
    tail: str = ""
    """The end of the batch script's own log, control characters removed."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankWatch:
    """What the watcher remembers of a rank between two ticks; `_mono` are its own monotonic clock."""

    rank: int
    node: str
    beat: int
    flush: int
    step: int
    phase: str
    phase_budget_s: float | None
    beat_moved_mono: float
    flush_moved_mono: float


@dataclass(frozen=True, slots=True)
class Watch:
    """The watcher's memory of one attempt. Forgotten at the attempt's border and when `epoch_id` changes."""

    attempt: str
    epoch_id: str
    since_mono: float
    """When this watcher first saw the attempt RUNNING: what `startup` is counted from."""
    ranks: tuple[RankWatch, ...] = ()
    log_size_bytes: int = 0
    log_moved_mono: float = 0.0
    moved_wall_at: float | None = None
    """When any beat was last seen to move, for people."""


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """The batch script's own last word (events/<attempt>.batch.jsonl): the exit code before anybody shortened it."""

    exit_code: int
    at: float
    warned: bool = False  # it had been told to save and end, as Slurm does before a time limit (SIGUSR1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one tick knows of one run. `job is None` with no `blind` reason: the scheduler answered and does not
    know the job (any more). A non-empty `blind` means the scheduler could not be asked: nothing may be concluded."""

    run: Run
    wall_at: float
    mono: float
    blind: str = ""
    job: JobRecord | None = None
    attempt: Attempt | None = None
    accounted: JobRecord | None = None  # what accounting keeps of the attempt; asked only once it has ended
    down_nodes: tuple[str, ...] = ()  # of the attempt's; asked only when one may have failed
    watch: Watch | None = None
    heartbeats: HeartbeatReading = field(default_factory=HeartbeatReading)
    checkpoints: CheckpointReading = field(default_factory=CheckpointReading)
    log: LogReading = field(default_factory=LogReading)
    script_end: ScriptEnd | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        return self.heartbeats.problems + self.checkpoints.problems + self.log.problems


# ------------------------------------------------------------------------------------------------ conclusions


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
