"""krea-runner doctor"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from krea_runner.errors import ConfigError, KreaRunnerError
from krea_runner.observe.mounts import file_system
from krea_runner.schedulers import Check

if TYPE_CHECKING:
    from krea_runner.history.store import History
    from krea_runner.model import Run

# The newest Python this was not made for cannot be known; the oldest is pyproject's.
OLDEST_PYTHON = (3, 11)
LOW_BYTES = 1 << 30
FULL_BYTES = 50 << 20
SKEW_S = 5.0
# A supervisor from cron looks once a minute; a few missed looks are the least that can mean anything.
UNWATCHED_S = 300.0

# Mount options under which two hosts do not see each other's locks: nfs(5), mount.lustre(8).
LOCKLESS = frozenset({"nolock", "local_lock=all", "local_lock=posix", "noflock", "localflock"})
SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "wekafs", "pvfs2", "orangefs", "afs"}
)


def doctor(
    scheduler: Annotated[
        str | None,
        typer.Option(help="Check only this one: `slurm`, `local`, or `slurm@HOST` over SSH.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Check that this host can supervise runs.

    And say what to type where it cannot.

    Exit code 0: nothing FAILs. A `warn` is worth reading and stops nothing.

    Example: krea-runner doctor --scheduler slurm
    """
    from krea_runner.cli.output import print_json

    checks = list(run_checks(scheduler))
    if as_json:
        print_json(
            {
                "ok": all(check.ok for check in checks),
                "checks": [
                    {"name": check.name, "status": status_word(check), "detail": check.detail, "hint": check.hint}
                    for check in checks
                ],
            }
        )
    else:
        _print(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def status_word(check: Check) -> str:
    """A check that is ok and has a hint all the same is a warning."""
    return "FAIL" if not check.ok else "warn" if check.hint else "ok"


def run_checks(only: str | None) -> Iterator[Check]:
    """Never raises: what breaks a check is its finding."""
    yield from _guarded("python", _python)
    yield from _guarded("state dir", _state_dir)
    yield from _guarded("templates", _templates)
    yield from _guarded("site.toml", _site)
    runs: list[Run] = []
    yield from _guarded("history", lambda: _history(runs))
    yield from _guarded("run dirs", lambda: _run_dirs(runs))
    for kind in _kinds(only, runs):
        yield from _guarded(kind, partial(_scheduler, kind))


def _guarded(name: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from check()
    except KreaRunnerError as error:
        yield Check(name, False, str(error), error.hint or "")
    except Exception as error:  # noqa: BLE001 - a doctor that dies of what it finds is of no use
        yield Check(name, False, f"{type(error).__name__}: {error}", "please report this")


# ---------------------------------------------------------------------------------------------------------- this host


def _python() -> Iterator[Check]:
    from krea_runner import __version__

    version = ".".join(map(str, sys.version_info[:3]))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    yield Check(
        "python",
        sys.version_info >= OLDEST_PYTHON,
        f"{version} ({sys.executable})",
        "" if sys.version_info >= OLDEST_PYTHON else f"install into a Python {oldest} or newer",
    )
    yield Check("krea_runner", True, f"{__version__} ({Path(__file__).parents[1]})")


def _templates() -> Iterator[Check]:
    from krea_runner.launch.render import template_dir

    yield Check("templates", True, str(template_dir()))


def _site() -> Iterator[Check]:
    from krea_runner.config.site_toml import site_files
    from krea_runner.diagnose.site import load_site_catalog

    files = site_files()
    try:
        load_site_catalog()
    except ConfigError as error:
        yield Check("site.toml", False, "; ".join([str(error), *error.problems]), error.hint or "")
    else:
        yield Check("site.toml", True, ", ".join(map(str, files)) or "none, the built-in signatures alone")


def _state_dir() -> Iterator[Check]:
    from krea_runner.config.site import state_dir

    folder = state_dir()
    place = "make it, or name another place: export KREA_RUNNER_STATE_DIR=/path/you/may/write"
    try:
        folder.stat()
    except FileNotFoundError:
        missing, folder = folder, next(parent for parent in folder.parents if parent.exists())
        may = os.access(folder, os.W_OK | os.X_OK)
        why = f"{missing} does not exist yet" + ("" if may else f", and {folder} is not writable")
        yield Check("state dir", may, why, "" if may else place)
    except OSError as error:
        yield Check("state dir", False, f"{folder}: {error.strerror}", place)
        return
    else:
        yield from _written(folder, place)
    kind, options = file_system(folder, Path("/proc/self/mountinfo").read_text())
    lockless = sorted(LOCKLESS & options)
    note = ", shared between hosts; the history does not use SQLite's WAL, so that is fine" if kind in SHARED else ""
    if lockless:
        yield Check(
            "file system",
            True,
            f"{kind}, mounted {','.join(lockless)}: hosts do not see each other's locks",
            "let one host only supervise, or set KREA_RUNNER_STATE_DIR to another file system",
        )
    else:
        yield Check("file system", True, f"{kind}{note}")
    free = shutil.disk_usage(folder).free
    hint = "" if free >= LOW_BYTES else f"df -h {folder}"
    yield Check("free space", free >= FULL_BYTES, f"{free / 1e9:.1f} GB in {folder}", hint)


def _written(folder: Path, place: str) -> Iterator[Check]:
    """Writable is what can be written to, and its time is what the file server says it is."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.") as file:
            before = time.time()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            written_at, after = os.stat(file.name).st_mtime, time.time()
    except OSError as error:
        yield Check("state dir", False, f"{folder} cannot be written to: {error.strerror}", place)
        return
    yield Check("state dir", True, f"{folder} is writable")
    skew = written_at - before if written_at < before else max(0.0, written_at - after)
    hint = (
        ""
        if abs(skew) < SKEW_S
        else "times in the history will look odd, nothing else: chronyc tracking, or timedatectl"
    )
    yield Check("clock", True, f"{abs(skew):.1f} s off the file server's", hint)


# --------------------------------------------------------------------------------------------------------- the history


def _history(live: "list[Run]") -> Iterator[Check]:
    """Leaves the runs that want a supervisor in `live`."""
    from krea_runner.cli import context
    from krea_runner.history.database import Database
    from krea_runner.model import RunState

    history = context.history_if_any()
    if history is None:
        yield Check("history", True, "none yet: nothing was ever submitted")
        return
    damage = Database(history.path, read_only=True).damage()
    size = f"{history.path} ({history.path.stat().st_size / 1e6:.1f} MB)"
    if damage:
        backup = f"keep a copy, then: sqlite3 {history.path} .recover | sqlite3 new.db"
        yield Check("history", False, f"{history.path} is damaged: {damage[0]}", backup)
    elif not os.access(history.path, os.W_OK):
        yield Check("history", False, f"{size} is not writable: nothing can be supervised", f"ls -l {history.path}")
    else:
        yield Check("history", True, f"{size}, sound")
    live += history.list_runs(user=context.current_user(), states=[s for s in RunState if s.is_supervised])
    yield from _supervisor(history, live)


def _supervisor(history: "History", runs: "list[Run]") -> Iterator[Check]:
    from krea_runner.cli import context
    from krea_runner.report.words import ago, one_line

    user, now = context.current_user(), time.time()
    from krea_runner.history.ticks import last_ticks

    tick = next((tick for tick in last_ticks(history) if tick.user == user), None)
    watched = tick is not None and now - tick.at < UNWATCHED_S
    needed = f"{len(runs)} active run{'s' * (len(runs) != 1)}"
    hint = f"krea-runner supervise --every 10s, or with crontab -e: {_cron_line()}"
    if tick is None:
        yield Check("supervisor", not runs, f"has never looked; {needed}", hint if runs else "")
    elif tick.blind:
        yield Check(
            "supervisor",
            True,
            f"looked {ago(now - tick.at)} on {tick.host}, and could not see: {one_line(tick.blind)}",
            "see the checks of the scheduler below",
        )
    else:
        yield Check(
            "supervisor",
            watched or not runs,
            f"looked {ago(now - tick.at)} on {tick.host}; {needed}",
            "" if watched or not runs else hint,
        )


def _cron_line() -> str:
    """With the whole path: cron's own PATH is /usr/bin:/bin."""
    command = Path(sys.executable).with_name("krea-runner")
    return f"* * * * * {command if command.exists() else f'{sys.executable} -m krea_runner'} supervise --for 55s"


def _run_dirs(runs: "list[Run]") -> Iterator[Check]:
    from krea_runner.report.words import one_line

    for run in runs:
        if run.config.files == "sftp":
            continue
        folder = run.config.run_dir
        if not os.access(folder, os.W_OK | os.X_OK):
            yield Check(
                "run dir",
                False,
                f"{one_line(run.name)}: {folder} is not there or not writable from here",
                f"ls -ld {folder}",
            )
    if runs:
        yield Check("run dirs", True, f"{len(runs)} looked at")


# -------------------------------------------------------------------------------------------------------- schedulers


def _kinds(only: str | None, runs: "list[Run]") -> list[str]:
    if only is not None:
        return [only]
    slurm = shutil.which("sbatch") is not None or any(run.config.endpoint == "slurm" for run in runs)
    far = sorted({run.config.endpoint for run in runs if run.config.transport == "ssh"})
    return [*far, *(["slurm", "local"] if slurm else ["local"])]


def _scheduler(kind: str) -> Iterator[Check]:
    from dataclasses import replace

    from krea_runner.cli import context

    for check in context.scheduler(kind).checks():
        yield check if check.name.startswith(kind) else replace(check, name=f"{kind} {check.name}")


# ----------------------------------------------------------------------------------------------------------- printing

_STYLE = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


def _print(checks: list[Check]) -> None:
    from krea_runner.report.words import one_line

    width = max(len(check.name) for check in checks)
    if not sys.stdout.isatty():
        for check in checks:
            typer.echo(
                f"{status_word(check):4}  {check.name:{width}}  {one_line(check.detail)}"
                + (f"  → {one_line(check.hint)}" if check.hint else "")
            )
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for check in checks:
        word = status_word(check)
        grid.add_row(
            Text(word, style=_STYLE[word]),
            Text(check.name, no_wrap=True),
            Text(one_line(check.detail), overflow="fold"),
        )
        if check.hint:
            grid.add_row("", "", Text(f"→ {one_line(check.hint)}", style="cyan", overflow="fold"))
    Console(highlight=False).print(grid)
