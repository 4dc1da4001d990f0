"""The logs of a run, by its name, for `krea-runner diagnose`."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def logs_of_run(names: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Where the logs are for now and where they really are, when that is not the same, and what to read: `names` as they are,
    unless it is one that is no file but the name of a run.

    Raises: FilesUnavailable.
    """
    run = None
    if len(names) == 1 and names[0] != "-" and not os.path.lexists(names[0]):  # nothing is loaded for a log
        from krea_runner.cli import context
        from krea_runner.errors import NotFound
        from krea_runner.rundir import RunDir

        history = context.history_if_any()
        with suppress(NotFound):
            run = history.find_run(names[0], user=context.current_user()) if history is not None else None
    if run is None or history is None:
        yield "", "", names
        return
    incidents, latest = history.incidents(run_id=run.run_id, limit=1), history.latest_attempt(run.run_id)
    attempt = incidents[-1].attempt if incidents else latest.key if latest is not None else None
    if attempt is None:
        raise NotFound(f"{run.name!r} has not started yet: there is no log", hint=f"krea-runner status {names[0]}")
    config = run.config
    if config.job_log is not None:
        yield "", "", [str(config.job_log)]
        return
    if config.files != "sftp":
        yield (
            "",
            "",
            _there(RunDir(config.run_dir).batch_log(attempt.job_id), RunDir(config.run_dir).attempt_logs(attempt)),
        )
        return
    from krea_runner.transport.mirror import copy_logs

    with tempfile.TemporaryDirectory(prefix="krea-runner-") as folder:
        copy_logs(config, attempt, Path(folder))
        near = RunDir(Path(folder))
        yield folder, str(config.run_dir), _there(near.batch_log(attempt.job_id), near.attempt_logs(attempt))


def _there(*paths: Path) -> list[str]:
    return [str(path) for path in paths if path.exists()] or [str(paths[0])]
