"""The records every layer shares. Frozen data, no I/O; times named `_at` are seconds since the epoch (UTC) unless they
are said to be monotonic."""

from krea_runner.model.incident import (
    EXPLAINED,
    Action,
    ActionKind,
    ActionStage,
    Decision,
    DecisionKind,
    Diagnosis,
    Finding,
    Incident,
    Suspect,
    Symptom,
)
from krea_runner.model.job import AttemptKey, JobRecord, JobState
from krea_runner.model.learned import Budget, Learned
from krea_runner.model.observation import (
    Checkpoint,
    CheckpointReading,
    HeartbeatReading,
    LogReading,
    RankBeat,
    RankWatch,
    ScriptEnd,
    Snapshot,
    Watch,
)
from krea_runner.model.run import Attempt, Run, RunState
from krea_runner.model.settings import SCHEDULERS, Budgets, CheckpointSpec, EvidenceSpec, Gang, Policy, RunConfig

__all__ = [
    "EXPLAINED",
    "SCHEDULERS",
    "Action",
    "ActionKind",
    "ActionStage",
    "Attempt",
    "AttemptKey",
    "Budget",
    "Budgets",
    "Checkpoint",
    "CheckpointReading",
    "CheckpointSpec",
    "Decision",
    "DecisionKind",
    "Diagnosis",
    "EvidenceSpec",
    "Finding",
    "Gang",
    "HeartbeatReading",
    "Incident",
    "JobRecord",
    "JobState",
    "Learned",
    "LogReading",
    "Policy",
    "RankBeat",
    "RankWatch",
    "Run",
    "RunConfig",
    "RunState",
    "ScriptEnd",
    "Snapshot",
    "Suspect",
    "Symptom",
    "Watch",
]
