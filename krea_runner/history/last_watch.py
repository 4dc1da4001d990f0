"""What the watcher remembers of a run from one attempt to the next."""

import sqlalchemy as sa

from krea_runner.history.schema import attempts
from krea_runner.history.store import History
from krea_runner.model import Watch


def last_watch(history: History, run_id: int) -> Watch | None:
    """Of the newest attempt that has been watched; None when none has, or only by another version."""
    with history.database.read() as connection:
        attempt_id = connection.execute(
            sa.select(sa.func.max(attempts.c.attempt_id)).where(
                attempts.c.run_id == run_id, attempts.c.watch.is_not(None)
            )
        ).scalar_one_or_none()
    return None if attempt_id is None else history.watch(attempt_id)
