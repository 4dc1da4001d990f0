"""What the watcher remembers of a run from one attempt to the next."""

import json

import sqlalchemy as sa

from krea_runner.history.rows import watch_of
from krea_runner.history.schema import attempts
from krea_runner.history.store import History
from krea_runner.model import Watch


def last_watch(history: History, run_id: int) -> Watch | None:
    """Of the newest attempt that has been watched; None when none has, or only by another version."""
    with history.database.read() as connection:
        stored = connection.execute(
            sa.select(attempts.c.watch)
            .where(attempts.c.run_id == run_id, attempts.c.watch.is_not(None))
            .order_by(attempts.c.attempt_id.desc())
            .limit(1)
        ).scalar_one_or_none()
    try:
        return None if stored is None else watch_of(json.loads(stored))
    except TypeError:
        return None
