"""What a run left behind, by its name, for `krea-runner diagnose`."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from krea_runner.diagnose.signatures import Catalog
    from krea_runner.diagnose.verdict import Verdict
    from krea_runner.history.store import History
    from krea_runner.model import Attempt, Run


def verdict_of_run(
    names: list[str], catalog: "Catalog", kernel_logs: Mapping[str, str]
) -> "tuple[Verdict, str, str] | None":
    """None unless `names` is one name, of no file but of a run. The verdict comes with the place that its files were read from
    and the one they really have, where that is not the same: of the attempt of its last incident, else of its newest.

    Raises: NotFound, FilesUnavailable, LogUnreadable.
    """
    if len(names) != 1 or names[0] == "-" or os.path.lexists(names[0]):  # nothing is loaded for a log
        return None
    from krea_runner.cli import context
    from krea_runner.errors import NotFound

    history, run = context.history_if_any(), None
    with suppress(NotFound):
        run = history.find_run(names[0], user=context.current_user()) if history is not None else None
    if run is None or history is None:
        return None
    attempt = _attempt(history, run)
    if attempt is None:
        raise NotFound(f"{run.name!r} has not started yet: there is no log", hint=f"krea-runner status {names[0]}")
    return _verdict(run, attempt, catalog, kernel_logs)


def _attempt(history: "History", run: "Run") -> "Attempt | None":
    incidents, attempts = history.incidents(run_id=run.run_id, limit=1), history.attempts(run.run_id)
    meant = incidents[-1].attempt if incidents else None
    return next((one for one in attempts if one.key == meant), attempts[-1] if attempts else None)


def _verdict(
    run: "Run", attempt: "Attempt", catalog: "Catalog", kernel_logs: Mapping[str, str]
) -> "tuple[Verdict, str, str]":
    from krea_runner.clock import SystemClock
    from krea_runner.errors import NotFound
    from krea_runner.observe.snapshot import observe
    from krea_runner.supervise.left_behind import WHOLE, read_left_behind

    snapshot = observe(run, None, attempt, None, SystemClock())
    verdict, left = read_left_behind(
        snapshot, catalog, still_running=attempt.ended_at is None, bounds=WHOLE, kernel_logs=kernel_logs
    )
    if verdict is None:
        why = f": {left.problems[0]}" if left.problems else ""
        raise NotFound(f"{run.name!r} left no log of {attempt.key}{why}", hint=f"krea-runner status {run.config.slug}")
    same = left.near == left.far
    return verdict, "" if same else left.near, "" if same else left.far
