"""The table of warnings: what a person should look at before it is a failure. One row an episode."""

from collections.abc import Collection, Mapping

import sqlalchemy as sa

from krea_runner.history.schema import warnings
from krea_runner.history.store import History
from krea_runner.model import Warned

# What comes back this soon is the same episode: it is not told again.
SAME_S = 3600.0


def settle_warnings(
    history: History, run_id: int, attempt: str, found: Mapping[str, str], *, looked_for: Collection[str], now: float
) -> list[str]:
    """Begin and end the episodes of one run; returns the texts of those that are new. Of kinds that were not `looked_for`
    (could not see) nothing changes."""
    with history.database.read() as connection:
        query = sa.select(warnings).where(warnings.c.run_id == run_id)
        known = connection.execute(query.order_by(warnings.c.warning_id)).all()
    last = {row.kind: row for row in known if row.attempt == attempt}
    open_kinds = {kind for kind, row in last.items() if row.ended_at is None}
    over = [row.warning_id for row in known if row.ended_at is None and (row.attempt != attempt or (
        row.kind in looked_for and row.kind not in found))]  # fmt: skip
    begun = [kind for kind in found if kind not in open_kinds]
    if not over and not begun:
        return []
    again = [kind for kind in begun if kind in last and now - last[kind].ended_at < SAME_S]
    fresh = [kind for kind in begun if kind not in again]
    with history.database.write() as connection:
        if over:
            connection.execute(sa.update(warnings).where(warnings.c.warning_id.in_(over)).values(ended_at=now))
        for kind in again:
            changed = sa.update(warnings).where(warnings.c.warning_id == last[kind].warning_id)
            connection.execute(changed.values(ended_at=None, text=found[kind]))
        rows = [
            {"run_id": run_id, "attempt": attempt, "kind": kind, "text": found[kind], "began_at": now} for kind in fresh
        ]
        if rows:
            connection.execute(sa.insert(warnings), rows)
    return [found[kind] for kind in fresh]


def list_warnings(history: History, run_id: int, *, open_only: bool = False) -> list[Warned]:
    """Oldest first."""
    query = sa.select(warnings).where(warnings.c.run_id == run_id).order_by(warnings.c.warning_id)
    if open_only:
        query = query.where(warnings.c.ended_at.is_(None))
    with history.database.read() as connection:
        rows = connection.execute(query).all()
    return [Warned(row.run_id, row.attempt, row.kind, row.text, row.began_at, row.ended_at) for row in rows]
