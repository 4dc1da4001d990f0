"""Rows of the history's tables → records of model/."""

import json
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from krea_runner.config import config_from_json
from krea_runner.model import (
    Action,
    ActionKind,
    ActionStage,
    Attempt,
    AttemptKey,
    Decision,
    DecisionKind,
    Diagnosis,
    Finding,
    Incident,
    JobState,
    Run,
    RunState,
    Suspect,
    Symptom,
)


def run_of(row: sa.Row[Any]) -> Run:
    return Run(
        run_id=row.run_id,
        name=row.name,
        user=row.user,
        config=config_from_json(row.config),
        state=RunState(row.state),
        state_reason=row.state_reason,
        job_id=row.job_id,
        tag=row.tag,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def attempt_of(row: sa.Row[Any]) -> Attempt:
    return Attempt(
        attempt_id=row.attempt_id,
        run_id=row.run_id,
        key=AttemptKey(row.job_id, row.restart_count, row.relaunch),
        first_seen_at=row.first_seen_at,
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        end_state=None if row.end_state is None else JobState(row.end_state),
        exit_code=row.exit_code,
        signal=row.signal,
        end_node=row.end_node,
        ended_by=row.ended_by,
        nodelist=row.nodelist,
        first_step=row.first_step,
        last_step=row.last_step,
    )


def incident_of(row: sa.Row[Any]) -> Incident:
    return Incident(
        incident_id=row.incident_id,
        run_id=row.run_id,
        run_name=row.name,
        attempt=AttemptKey(row.job_id, row.restart_count, row.relaunch),
        finding=Finding(
            symptom=Symptom(row.symptom),
            cause=row.cause,
            summary=row.summary,
            node=row.node,
            by=row.by,
            step=row.step,
            last_progress_at=row.last_progress_at,
            evidence=tuple(json.loads(row.evidence)),
            suspects=tuple(Suspect(**suspect) for suspect in json.loads(row.suspects)),
            agreed_by=row.agreed_by,
            diagnosis=None if row.diagnosis is None else _diagnosis(json.loads(row.diagnosis)),
        ),
        noticed_at=row.noticed_at,
        checkpoint_step=row.checkpoint_step,
        decision=Decision(DecisionKind(row.decision), row.decision_reason),
        restarted_at=row.restarted_at,
        resumed_at=row.resumed_at,
        resumed_step=row.resumed_step,
    )


def _diagnosis(values: dict[str, Any]) -> Diagnosis:
    """Fields that a newer version added are left out."""
    names = {field.name for field in fields(Diagnosis)}
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in names
    }
    return Diagnosis(**known)


def action_of(row: sa.Row[Any]) -> Action:
    return Action(
        action_id=row.action_id,
        run_id=row.run_id,
        incident_id=row.incident_id,
        kind=ActionKind(row.kind),
        stage=ActionStage(row.stage),
        job_id=row.job_id,
        restart_count=row.restart_count,
        reason=row.reason,
        created_at=row.created_at,
        updated_at=row.updated_at,
        detail=row.detail,
    )
