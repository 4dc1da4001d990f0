"""The table of ticks: when each supervisor last looked, and what it could not see."""

from dataclasses import asdict, dataclass

import sqlalchemy as sa

from krea_runner.history.schema import ticks
from krea_runner.history.store import History


@dataclass(frozen=True, slots=True)
class TickRecord:
    host: str
    user: str
    at: float
    blind: str
    """Why that tick could not see; empty when it could."""


def record_tick(history: History, tick: TickRecord) -> None:
    with history.database.write() as connection:
        connection.execute(sa.delete(ticks).where(ticks.c.host == tick.host, ticks.c.user == tick.user))
        connection.execute(sa.insert(ticks).values(asdict(tick)))


def last_ticks(history: History) -> list[TickRecord]:
    """Newest first, one a host and user."""
    with history.database.read() as connection:
        rows = connection.execute(sa.select(ticks).order_by(ticks.c.at.desc()))
        return [TickRecord(**row._mapping) for row in rows]
