"""What did it, found out after the incident was put on record."""

import json
from dataclasses import asdict

import sqlalchemy as sa

from krea_runner.history.schema import incidents
from krea_runner.history.store import History
from krea_runner.model import Finding


def note_diagnosis(history: History, incident_id: int, finding: Finding) -> None:
    """Its diagnosis and suspects; how it showed and what was decided stay as they are."""
    told = None if finding.diagnosis is None else json.dumps(asdict(finding.diagnosis))
    suspects = json.dumps([asdict(suspect) for suspect in finding.suspects])
    with history._db.write() as connection:
        connection.execute(
            sa.update(incidents).where(incidents.c.incident_id == incident_id).values(diagnosis=told, suspects=suspects)
        )
