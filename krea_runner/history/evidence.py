"""What was found out about an incident after it was put on record."""

import json
from collections.abc import Sequence

import sqlalchemy as sa

from krea_runner.history.schema import incidents
from krea_runner.history.store import History


def add_evidence(history: History, incident_id: int, lines: Sequence[str]) -> None:
    """Put `lines` before what the incident has; lines that it has already are not repeated."""
    with history.database.write() as connection:
        mine = incidents.c.incident_id == incident_id
        known = json.loads(connection.execute(sa.select(incidents.c.evidence).where(mine)).scalar_one())
        new = [line for line in lines if line not in known]
        connection.execute(sa.update(incidents).where(mine).values(evidence=json.dumps([*new, *known])))
