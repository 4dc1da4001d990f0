"""The table of exclusions: which nodes a run is kept off, why, by whom and until when."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from krea_runner.history.schema import exclusions
from krea_runner.history.store import History


@dataclass(frozen=True, slots=True)
class Exclusion:
    exclusion_id: int
    run_id: int | None
    """None: every run of `user`."""
    user: str
    node: str
    reason: str
    evidence: str
    who: str
    created_at: float
    expires_at: float | None
    """None: until somebody takes it back."""

    def is_active(self, now: float) -> bool:
        return self.expires_at is None or self.expires_at > now


def add_exclusions(
    history: History,
    nodes: Sequence[str],
    *,
    run_id: int | None,
    user: str,
    reason: str,
    who: str,
    now: float,
    expires_at: float | None,
    evidence: str = "",
) -> None:
    shared = {
        "run_id": run_id, "user": user, "reason": reason, "evidence": evidence, "who": who, "created_at": now,
        "expires_at": expires_at,
    }  # fmt: skip
    if nodes:
        with history.database.write() as connection:
            connection.execute(sa.insert(exclusions), [{"node": node, **shared} for node in dict.fromkeys(nodes)])


def end_exclusions(history: History, nodes: Sequence[str], *, user: str, run_id: int | None, now: float) -> int:
    """Take back what is active for these nodes: of one run, or with None of the user's all. Returns how many there were."""
    query = (
        sa.update(exclusions)
        .where(exclusions.c.user == user, exclusions.c.node.in_(list(nodes)))
        .where(sa.or_(exclusions.c.expires_at.is_(None), exclusions.c.expires_at > now))
    )
    if run_id is not None:
        query = query.where(exclusions.c.run_id == run_id)
    with history.database.write() as connection:
        return connection.execute(query.values(expires_at=now)).rowcount


def list_exclusions(history: History, *, user: str, run_id: int | None = None) -> list[Exclusion]:
    """Newest first, ended ones too; with `run_id` those that concern that run."""
    query = sa.select(exclusions).where(exclusions.c.user == user).order_by(exclusions.c.exclusion_id.desc())
    if run_id is not None:
        query = query.where(sa.or_(exclusions.c.run_id == run_id, exclusions.c.run_id.is_(None)))
    with history.database.read() as connection:
        return [Exclusion(**row._mapping) for row in connection.execute(query)]
