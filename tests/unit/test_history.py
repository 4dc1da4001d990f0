import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from krea_runner.errors import HistoryError, HistoryUnavailable, NotFound, SchemaTooNew
from krea_runner.history import database
from krea_runner.history.schema import HEAD, metadata
from krea_runner.history.store import History, LeaseLost, TickRecord, open_history
from krea_runner.model import (
    ActionKind,
    AttemptKey,
    Decision,
    DecisionKind,
    Finding,
    RankWatch,
    RunState,
    Suspect,
    Symptom,
    Watch,
)

from .conftest import make_config

NOW = 1_800_000_000.0
CRASH = Finding(
    Symptom.CRASH, "rank_killed", "crash: rank 3", node="n2", step=70, last_progress_at=NOW - 3, evidence=("a", "b"),
    suspects=(Suspect("rank", "3", "died"),), agreed_by="",
)  # fmt: skip
REQUEUE = Decision(DecisionKind.REQUEUE, "from step 50")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return open_history(tmp_path / "state")


def make_active(history: History, tmp_path: Path, name: str = "llm") -> int:
    config = make_config(tmp_path, name=name, slug=name, run_dir=tmp_path / name)
    run = history.create_run(config, user="alice", tag=f"tag-{name}", now=NOW)
    history.set_submitted(run.run_id, "7", now=NOW)
    return run.run_id


def take(history: History, run_id: int, holder: str = "h:1:1", now: float = NOW):
    return history.take_leases([run_id], holder, now=now, until=now + 60).get(run_id)


def test_a_run_comes_back_as_it_was_stored(history: History, tmp_path: Path) -> None:
    run_id = make_active(history, tmp_path)
    run = history.find_run("llm", user="alice")
    assert (run.run_id, run.state, run.job_id, run.tag) == (run_id, RunState.ACTIVE, "7", "tag-llm")
    assert run.config == make_config(tmp_path, run_dir=tmp_path / "llm")
    assert history.find_run(f"#{run_id}") == run
    with pytest.raises(NotFound):
        history.find_run("llm", user="bob")


def test_one_directory_has_one_live_run(history: History, tmp_path: Path) -> None:
    run_id = make_active(history, tmp_path)
    with pytest.raises(HistoryError, match="a run is alive in"):
        make_active_again(history, tmp_path)
    history.set_run_state(run_id, RunState.DONE, "", now=NOW)
    make_active_again(history, tmp_path)


def make_active_again(history: History, tmp_path: Path) -> None:
    history.create_run(make_config(tmp_path, run_dir=tmp_path / "llm"), user="alice", tag="again", now=NOW)


def test_an_incident_its_decision_and_its_action_are_one_commit(history: History, tmp_path: Path) -> None:
    run_id = make_active(history, tmp_path)
    lease = take(history, run_id)
    attempt = history.add_attempt(run_id, AttemptKey("7"), now=NOW)
    incident_id = history.record_incident(
        lease, attempt, CRASH, REQUEUE, checkpoint_step=50, now=NOW, action=(ActionKind.REQUEUE, 0)
    )
    (incident,) = history.incidents(run_id=run_id)
    assert incident.incident_id == incident_id
    assert (incident.finding, incident.decision, incident.attempt) == (CRASH, REQUEUE, AttemptKey("7"))
    assert (incident.lost_steps, incident.notice_s) == (20, 3.0)
    action = history.open_action(run_id)
    assert action is not None
    assert (action.kind, action.incident_id) == (ActionKind.REQUEUE, incident_id)


def test_an_attempt_has_one_incident_however_often_it_is_noticed(history: History, tmp_path: Path) -> None:
    run_id = make_active(history, tmp_path)
    lease = take(history, run_id)
    attempt = history.add_attempt(run_id, AttemptKey("7"), now=NOW)
    for _ in range(3):
        history.record_incident(
            lease, attempt, CRASH, REQUEUE, checkpoint_step=50, now=NOW, action=(ActionKind.REQUEUE, 0)
        )
    assert len(history.incidents(run_id=run_id)) == 1
    assert len(history.actions(run_id)) == 1


def test_a_stale_lease_writes_nothing(history: History, tmp_path: Path) -> None:
    run_id = make_active(history, tmp_path)
    old = take(history, run_id)
    attempt = history.add_attempt(run_id, AttemptKey("7"), now=NOW)
    assert take(history, run_id, "h:2:2") is None
    assert take(history, run_id, "h:2:2", now=NOW + 61) is not None
    assert not history.holds(old)
    with pytest.raises(LeaseLost):
        history.record_incident(
            old, attempt, CRASH, REQUEUE, checkpoint_step=50, now=NOW, action=(ActionKind.REQUEUE, 0)
        )
    assert history.incidents() == []
    assert history.open_action(run_id) is None
    history.drop_leases([old])
    assert history.lease_holder(run_id) == "h:2:2"


def test_of_two_supervisors_that_want_the_lease_at_once_one_gets_it(history: History, tmp_path: Path) -> None:
    run_id = make_active(history, tmp_path)
    got: list[object] = []
    threads = [threading.Thread(target=lambda n=n: got.append(take(history, run_id, f"h:{n}:{n}"))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert sum(lease is not None for lease in got) == 1


def test_a_watch_survives_between_ticks(history: History, tmp_path: Path) -> None:
    run_id = make_active(history, tmp_path)
    attempt = history.add_attempt(run_id, AttemptKey("7"), now=NOW)
    assert history.watch(attempt.attempt_id) is None
    watch = Watch("7.r0", "h/b", 10.0, (RankWatch(0, "n1", 1, 2, 3, "step", None, 11.0, 12.0),), 100, 13.0, NOW)
    history.save_observations((attempt, watch))
    assert history.watch(attempt.attempt_id) == watch


def test_the_last_tick_of_each_host_is_known(history: History) -> None:
    history.record_tick(TickRecord("login1", "alice", NOW, ""))
    history.record_tick(TickRecord("login2", "alice", NOW + 5, "controller away"))
    history.record_tick(TickRecord("login1", "alice", NOW + 9, ""))
    assert [(tick.host, tick.at) for tick in history.last_ticks()] == [("login1", NOW + 9), ("login2", NOW + 5)]


# ------------------------------------------------------------------------------------------------- the file itself


def test_migrations_lead_to_the_schema_in_the_code(history: History) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    assert ScriptDirectory(str(Path(database.__file__).parent / "migrations")).get_heads() == [HEAD]
    with history._db.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_two_first_users_at_once_both_find_a_history(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def first_use() -> None:
        try:
            open_history(tmp_path / "state").list_runs()
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=first_use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = open_history(tmp_path).path
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew, match="9999") as caught:
        open_history(tmp_path)
    assert caught.value.exit_code == 78
    assert "pip install" in (caught.value.hint or "")


def test_a_locked_history_is_try_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    history = open_history(tmp_path)
    other = sqlite3.connect(history.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(HistoryUnavailable, match="locked") as caught:
        history.record_tick(TickRecord("h", "u", NOW, ""))
    assert caught.value.exit_code == 75
    other.close()
    history.record_tick(TickRecord("h", "u", NOW, ""))


def test_some_other_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "history.db").write_bytes(b"this is no database, it is a letter\n" * 50)
    with pytest.raises(HistoryError, match="not a database") as caught:
        open_history(tmp_path)
    assert str(tmp_path) in (caught.value.hint or "")


def test_a_full_disk_loses_nothing_that_was_there(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    history.record_tick(TickRecord("h", "u", NOW, ""))
    with history._db.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

    import sqlalchemy as sa

    @sa.event.listens_for(history._db._engine, "connect")
    def _no_more_pages(dbapi_connection, _record) -> None:
        dbapi_connection.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(HistoryUnavailable, match="full"):
        history.record_tick(TickRecord("h", "x" * 100_000, NOW, ""))
    assert [tick.user for tick in history.last_ticks()] == ["u"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the read-only case runs as an ordinary user")
def test_a_read_only_history_can_be_read(tmp_path: Path) -> None:
    history = open_history(tmp_path)
    history.path.chmod(stat.S_IRUSR)
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert open_history(tmp_path).list_runs() == []
        with pytest.raises(HistoryUnavailable, match="readonly"):
            history.record_tick(TickRecord("h", "u", NOW, ""))
    finally:
        tmp_path.chmod(0o700)
