"""Opening history.db: transactions, migrations, and every way SQLite says no turned into our own errors."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.pool import NullPool

from krea_runner.errors import HistoryError, HistoryUnavailable, SchemaTooNew
from krea_runner.history.schema import HEAD

# What SQLite says, what it means for the caller, what to type. Lower case, first match wins (messages of SQLite 3.40).
_SAYS: tuple[tuple[str, type[HistoryError], str], ...] = (
    (
        "locked",
        HistoryUnavailable,
        "another krea-runner is writing; try again, or look for a stuck one: fuser {path}",
    ),
    (
        "readonly",
        HistoryUnavailable,
        "make it writable (ls -l {path}), or name another place: KREA_RUNNER_STATE_DIR",
    ),
    ("disk is full", HistoryUnavailable, "free space or quota where it lies: df -h {parent}"),
    (
        "unable to open",
        HistoryUnavailable,
        "look at the folder: ls -ld {parent}; or set KREA_RUNNER_STATE_DIR",
    ),
    ("disk i/o error", HistoryUnavailable, "the file system fails: df -h {parent}; dmesg | tail"),
    ("malformed", HistoryError, "keep a copy of {path}, then: sqlite3 {path} .recover | sqlite3 new.db"),
    ("not a database", HistoryError, "{path} is some other file; move it away or set KREA_RUNNER_STATE_DIR"),
)
BUSY_TIMEOUT_S = 5.0


class Database:
    """One history.db. `read()` and `write()` give a connection inside a transaction that commits at the end of the block.

    Not WAL: it needs shared memory, and a history that two login nodes share lies on a network file system
    (sqlite.org/wal.html). A writer takes the lock at once (BEGIN IMMEDIATE), so no transaction fails half way for it.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        mode = "ro" if read_only else "rwc"
        self._engine = sa.create_engine(
            f"sqlite:///file:{_quoted(path)}?mode={mode}&uri=true",
            poolclass=NullPool,
            connect_args={"timeout": BUSY_TIMEOUT_S, "isolation_level": None},
        )
        sa.event.listen(self._engine, "connect", _on_connect)
        sa.event.listen(self._engine, "begin", _on_begin)
        self._kept = threading.local()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """All transactions of this thread in the block share one open file: opening it costs as much as a small read."""
        with self._translated("opening"), self._engine.connect() as connection:
            self._kept.connection = connection
            try:
                yield
            finally:
                del self._kept.connection

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        with self._translated("reading"), self._connection(write=False) as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        with self._translated("writing to"), self._connection(write=True) as connection, connection.begin():
            yield connection

    def _connection(self, *, write: bool) -> contextlib.AbstractContextManager[sa.Connection]:
        kept: sa.Connection | None = getattr(self._kept, "connection", None)
        if kept is not None:
            return contextlib.nullcontext(kept.execution_options(krea_write=write))
        return self._engine.connect().execution_options(krea_write=write)

    def migrate(self) -> None:
        """Bring the schema to HEAD. Alembic is imported only when there is something to do.

        Raises: SchemaTooNew when a newer krea_runner has written this file.
        """
        if self._version() == HEAD:
            return
        with self.write() as connection:  # whoever comes second finds the work done
            version = _version_on(connection)
            if version == HEAD:
                return
            from alembic.config import Config
            from alembic.script import ScriptDirectory
            from alembic.util import CommandError

            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            try:
                ScriptDirectory.from_config(config).get_revision(version or "base")
            except CommandError:
                raise SchemaTooNew(
                    f"{self.path} has schema {version}, this krea-runner knows up to {HEAD}",
                    hint="upgrade krea-runner: pip install -U krea-runner",
                ) from None
            if version is not None:
                self._backup(version)
            from alembic import command

            config.attributes["connection"] = connection
            command.upgrade(config, HEAD)

    def damage(self) -> list[str]:
        """What SQLite itself finds wrong with the file; empty when it is sound."""
        with self.read() as connection:
            said = [str(line) for line in connection.exec_driver_sql("PRAGMA quick_check(10)").scalars()]
        return [] if said == ["ok"] else said

    def _version(self) -> str | None:
        with self.read() as connection:
            return _version_on(connection)

    def _backup(self, version: str) -> None:
        source = sqlite3.connect(f"file:{_quoted(self.path)}?mode=ro", uri=True)
        target = sqlite3.connect(self.path.with_name(f"{self.path.name}.before-{version}-{HEAD}"))
        try:
            source.backup(target)
        finally:
            source.close()
            target.close()

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except exc.IntegrityError:
            raise  # the caller's own rule, not the file's trouble
        except exc.DBAPIError as error:
            said = str(error.orig)
            for text, kind, hint in _SAYS:
                if text in said.lower():
                    filled = hint.format(path=self.path, parent=self.path.parent)
                    raise kind(f"{doing} the history {self.path}: {said}", hint=filled) from error
            raise HistoryError(f"{doing} the history {self.path}: {said}") from error


def open_history_file(state_dir: Path) -> Database:
    """The history in `state_dir`, made or brought up to date when needed; read-only when that is all one may do.

    Raises: HistoryUnavailable, HistoryError, SchemaTooNew.
    """
    path = state_dir / "history.db"
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise HistoryUnavailable(
            f"making the state directory {state_dir}: {error.strerror}",
            hint="make it, or name another place: export KREA_RUNNER_STATE_DIR=/path/you/may/write",
        ) from error
    database = Database(path)
    database.migrate()
    return database


def _quoted(path: Path) -> str:
    import urllib.parse

    return urllib.parse.quote(str(path.absolute()))


def _on_connect(dbapi_connection: Any, _record: Any) -> None:
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _on_begin(connection: sa.Connection) -> None:
    write = connection.get_execution_options().get("krea_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _version_on(connection: sa.Connection) -> str | None:
    table = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").scalar()
    if table is None:
        return None
    version: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return version
