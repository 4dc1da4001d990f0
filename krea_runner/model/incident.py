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


# Symptoms that leave open what did it.
EXPLAINED = frozenset({Symptom.CRASH, Symptom.HANG, Symptom.REQUEUED_ELSEWHERE})
# What the logs say when they say nothing of a failure.
NO_CAUSE = frozenset({"unknown_failure", "healthy_running", "completed"})


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the attempt's logs, dumps and kernel logs say did it. All text is printable."""

    cause: str
    """A name under [cause] in diagnose/signatures.toml, or of the site's own table."""
    policy: str = ""
    """`restart`, `restart_and_exclude_node`, `stop_for_human` or `not_a_crash`."""
    title: str = ""
    advice: str = ""
    confidence: str = "low"
    why: str = ""
    everywhere: bool = False
    """Every rank of the gang says the same."""
    first: str = ""
    """The first evidence, with its file and line."""
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """What was not read, and why."""

    @property
    def names_cause(self) -> bool:
        return self.cause not in NO_CAUSE

    @property
    def is_sure(self) -> bool:
        return self.names_cause and self.confidence == "high"

    @property
    def line(self) -> str:
        """What did it, for one line; where nothing was found, why not."""
        if not self.names_cause:
            return f"its logs do not say why ({self.problems[0]})" if self.problems else "its logs do not say why"
        doubt = "" if self.confidence == "high" else f" ({self.confidence} confidence)"
        who = _who(self.nodes, self.ranks, self.gpus)
        return f"{self.title}{doubt}{f', {who}' if who else ''}{f': {self.first}' if self.first else ''}"


def _who(nodes: tuple[str, ...], ranks: tuple[int, ...], gpus: tuple[str, ...]) -> str:
    """The first few suspects."""
    parts = []
    for kind, names in (("node", nodes), ("rank", tuple(map(str, ranks))), ("GPU", gpus)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{kind} {','.join(names[:3])}{more}")
    return f"suspect {' '.join(parts)}" if parts else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One failure of one attempt, as diagnosed: what is written down before anything is done about it."""

    symptom: Symptom
    cause: str
    """As it showed from outside, to the scheduler and in the heartbeats: a word such as `rank_stopped`, `rank_killed`,
    `exit_code`, `unknown`. What did it, where the logs say so, is `diagnosis.cause`."""
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
    diagnosis: Diagnosis | None = None
    """None: nobody has read the logs (yet)."""

    @property
    def known_cause(self) -> str:
        """What did it where that is known, else how it showed. A time limit, a preemption, a cancel are their own cause."""
        told = self.diagnosis if self.symptom in EXPLAINED else None
        return told.cause if told is not None and told.names_cause else self.cause

    @property
    def blamed_node(self) -> str:
        """Where a diagnosis is sure of the nodes it names, those; none where every rank says the same; else the one that
        complained."""
        told = self.diagnosis if self.symptom in EXPLAINED else None
        if told is None or not told.is_sure or not (told.nodes or told.everywhere):
            return self.node
        return ",".join(told.nodes)

    @property
    def why(self) -> str:
        """What did it, for one line; nothing where the logs were read and add nothing."""
        told = self.diagnosis
        return told.line if told is not None and (told.names_cause or told.problems) else ""

    @property
    def line(self) -> str:
        """What happened, and why."""
        return f"{self.summary}; {self.why}" if self.why else self.summary


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
