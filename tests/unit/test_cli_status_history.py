"""The reading verbs as a user and a script meet them: real processes, in a pipe and on a terminal of 80 columns."""

import dataclasses
import getpass
import json
import os
import pty
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import krea_runner
from krea_runner.history.store import History, open_history
from krea_runner.history.ticks import TickRecord, record_tick
from krea_runner.model import (
    AttemptKey,
    Decision,
    DecisionKind,
    Finding,
    Run,
    RunState,
    Suspect,
    Symptom,
)

from .conftest import make_config

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
USER = getpass.getuser()
NOBODY = 65534


def krea(state: Path, *argv: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KREA_RUNNER_STATE_DIR": str(state), **changes.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "krea_runner", *argv],
        check=False,
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        **changes,
    )


def on_terminal(state: Path, *argv: str, columns: int = 80) -> str:
    """What appears on a terminal, escape codes removed."""
    master, slave = pty.openpty()
    env = {**os.environ, "KREA_RUNNER_STATE_DIR": str(state), "COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-m", "krea_runner", *argv], stdout=slave, stderr=slave, env=env) as process:
        os.close(slave)
        data = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # how Linux says that the other side of a terminal is closed
                break
            if not part:
                break
            data += part
        process.wait(60)
    os.close(master)
    assert b"\x1b[" in data, "a terminal gets colours"
    return ANSI.sub("", data.decode()).replace("\r\n", "\n")


def seed(history: History, tmp_path: Path, name: str = "llm", *, run: int = 0, **changes: Any) -> Run:
    """A run with one attempt that hung, was requeued and stepped again; job 4711."""
    now = time.time()
    config = make_config(tmp_path, name=name, slug=f"slug-{run}", run_dir=tmp_path / f"run-{run}", **changes)
    created = history.create_run(config, user=USER, tag=f"tag-{run}", now=now - 500)
    history.set_submitted(created.run_id, "4711", now=now - 490)
    attempt = history.add_attempt(created.run_id, AttemptKey("4711"), now=now - 480)
    attempt = dataclasses.replace(attempt, started_at=now - 480, nodelist="n[1-2]", first_step=0, last_step=128)
    history.save_observations((attempt, None))
    lease = history.take_leases([created.run_id], "login1:1:1", now=now, until=now + 60)[created.run_id]
    assert lease is not None
    finding = Finding(
        symptom=Symptom.HANG, cause="rank_stopped", summary="hang: rank 3 on n2 stopped", node="n2", step=128,
        last_progress_at=now - 110, evidence=("rank 3 n2: step 128",), suspects=(Suspect("node", "n2", "stopped"),),
        agreed_by="logs silent 12 s",
    )  # fmt: skip
    decision = Decision(DecisionKind.REQUEUE, "from step 120, same job; restart 1 of 3")
    incident_id = history.record_incident(lease, attempt, finding, decision, checkpoint_step=120, now=now - 100)
    assert incident_id is not None
    history.note_recovery(incident_id, restarted_at=now - 98, resumed=(now - 59, 121))
    history.drop_leases([lease])
    return history.run(created.run_id)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def history(state: Path) -> History:
    return open_history(state)


# ------------------------------------------------------------------------------------------------- nothing there yet


def test_without_a_history_nothing_is_shown_and_nothing_is_made(state: Path) -> None:
    assert (krea(state, "status").stdout, krea(state, "status").returncode) == (
        "no runs (krea-runner submit RUN.TOML)\n",
        0,
    )
    assert (krea(state, "history").stdout, krea(state, "history").returncode) == ("no incidents\n", 0)
    assert json.loads(krea(state, "status", "--json").stdout) == {
        "schema_version": 1, "runs": [], "could_not_ask": [], "supervisor": None,
    }  # fmt: skip
    assert json.loads(krea(state, "history", "--json").stdout) == {"schema_version": 1, "incidents": []}
    assert not state.exists()


@pytest.mark.parametrize("verb", ["status", "history"])
def test_unknown_run_is_not_found(state: Path, history: History, verb: str) -> None:
    done = krea(state, verb, "nosuch")
    assert done.returncode == 3
    assert done.stderr.startswith("krea-runner: error: no run is called 'nosuch'")


@pytest.mark.parametrize("verb", ["status", "history"])
def test_history_that_is_no_database_is_said_and_not_touched(state: Path, verb: str) -> None:
    state.mkdir()
    (state / "history.db").write_text("this is somebody's letter" * 100)
    done = krea(state, verb)
    assert done.returncode == 1
    assert "file is not a database" in done.stderr
    assert "Traceback" not in done.stderr
    assert (state / "history.db").read_text().startswith("this is somebody's letter")


# ------------------------------------------------------------------------------------------------------------ history


def test_history_in_a_pipe_is_one_whole_line_an_incident(state: Path, history: History, tmp_path: Path) -> None:
    long_name = "a very long name [red]of a run[/red] " * 5
    seed(history, tmp_path, run=0)
    seed(history, tmp_path, long_name, run=1)
    done = krea(state, "history", env={"COLUMNS": "40"})
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, 3)
    assert long_name in lines[2]
    assert "\x1b" not in done.stdout
    assert re.search(
        r"T[\d:]+Z  llm +4711\.r0 +128  hang +rank_stopped  n2 +8 +10\.0s +41\.0s  REQUEUE +from step 120, same job; "
        r"restart 1 of 3  hang: rank 3 on n2 stopped$",
        lines[1],
    )


def test_history_limit_keeps_the_newest_and_a_name_selects_one_run(
    state: Path, history: History, tmp_path: Path
) -> None:
    seed(history, tmp_path, "first", run=0)
    seed(history, tmp_path, "second", run=1)
    newest = json.loads(krea(state, "history", "--json", "-n", "1").stdout)["incidents"]
    assert [incident["run"] for incident in newest] == ["second"]
    named = json.loads(krea(state, "history", "first", "--json").stdout)["incidents"]
    assert [incident["run"] for incident in named] == ["first"]


def test_history_document_holds_everything(state: Path, history: History, tmp_path: Path) -> None:
    run = seed(history, tmp_path)
    document = json.loads(krea(state, "history", "--json").stdout)
    assert document["schema_version"] == 1
    (incident,) = document["incidents"]
    times = {key: incident.pop(key) for key in ("noticed_at", "last_progress_at", "restarted_at", "resumed_at")}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", at) for at in times.values())
    assert (pytest.approx(10.0), pytest.approx(41.0)) == (incident.pop("notice_s"), incident.pop("resume_s"))
    assert incident == {
        "incident_id": 1, "run_id": run.run_id, "run": "llm", "attempt": "4711.r0", "job_id": "4711", "restart_count": 0,
        "symptom": "hang", "cause": "rank_stopped", "summary": "hang: rank 3 on n2 stopped", "node": "n2", "by": "", "step": 128,
        "checkpoint_step": 120, "lost_steps": 8, "decision": "REQUEUE",
        "decision_reason": "from step 120, same job; restart 1 of 3", "resumed_step": 121,
        "agreed_by": "logs silent 12 s", "evidence": ["rank 3 n2: step 128"],
        "suspects": [{"kind": "node", "name": "n2", "reason": "stopped"}], "diagnosis": None,
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["status", "history"])
def test_locale_that_cannot_write_a_character_shows_a_question_mark(
    state: Path, history: History, tmp_path: Path, verb: str
) -> None:
    seed(history, tmp_path, "数据")
    done = krea(state, verb, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "??" in done.stdout


def test_history_fits_a_terminal_of_80_columns(state: Path, history: History, tmp_path: Path) -> None:
    seed(history, tmp_path, "a-name-far-too-long-for-the-terminal-" * 2)
    lines = on_terminal(state, "history").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[2:] == "run step cause node lost noticed resumed".split()
    assert "    → REQUEUE: from step 120, same job; restart 1 of 3" in [line.rstrip() for line in lines]


def test_history_of_somebody_else_can_be_read_without_writing(history: History, state: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user who may not write")
    seed(history, tmp_path)
    package = Path(krea_runner.__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(state / "history.db", folder)
        Path(folder).chmod(0o555)
        (Path(folder) / "history.db").chmod(0o444)
        readable = subprocess.run(["test", "-r", package / "krea_runner/cli/app.py"], user=NOBODY, check=False)
        if readable.returncode != 0:
            pytest.skip(f"{package} is not readable for others")
        done = krea(Path(folder), "history", user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
        assert "rank_stopped" in done.stdout, done.stderr
        assert done.returncode == 0
        assert [stat.S_IMODE(path.stat().st_mode) for path in Path(folder).iterdir()] == [0o444]
        Path(folder).chmod(0o755)


# ------------------------------------------------------------------------------------------------------------- status


def test_scheduler_that_cannot_be_asked_is_75_and_the_rest_is_shown(
    state: Path, history: History, tmp_path: Path
) -> None:
    seed(history, tmp_path, scheduler="slurm")
    nowhere = {"PATH": str(tmp_path)}
    done = krea(state, "status", env=nowhere)
    assert done.returncode == 75
    assert "could not see: " in done.stdout
    assert re.search(r"llm  ACTIVE  4711 .* n\[1-2\] +128 ", done.stdout)
    assert "no supervisor has run: krea-runner supervise --every 10s" in done.stdout
    document = json.loads(krea(state, "status", "--json", env=nowhere).stdout)
    assert len(document["could_not_ask"]) == 1
    assert document["runs"][0]["could_not_see"] == document["could_not_ask"]
    assert document["runs"][0]["step"] == 128


def test_runs_that_are_over_are_shown_for_a_day_and_cost_no_question(
    state: Path, history: History, tmp_path: Path
) -> None:
    now = time.time()
    for number, (name, age) in enumerate([("fresh", 60.0), ("old", 90_000.0)]):
        run = seed(history, tmp_path, name, run=number, scheduler="slurm")
        history.set_run_state(run.run_id, RunState.DONE, "completed", now=now - age)
    done = krea(state, "status", env={"PATH": str(tmp_path)})
    assert done.returncode == 0, "no scheduler was needed"
    assert re.search(r"completed \(6\d s ago\)", done.stdout)
    assert "old" not in done.stdout
    assert "old" in krea(state, "status", "--all", env={"PATH": str(tmp_path)}).stdout


def test_held_run_comes_last_with_what_to_type(state: Path, history: History, tmp_path: Path) -> None:
    held = seed(history, tmp_path, "my [bold]run", run=0)
    seed(history, tmp_path, "other", run=1)
    history.set_run_state(held.run_id, RunState.HELD, "budget spent: 3 of 3", now=time.time())
    record_tick(history, TickRecord("login1", USER, time.time() - 200, ""))
    text = on_terminal(state, "status")
    assert text.index("other") < text.index("my [bold]run")
    assert "HELD: budget spent: 3 of 3. To go on: krea-runner resume 'my [bold]run'" in " ".join(text.split())
    assert "supervisor last looked 3 min ago on login1" in text
    assert max(map(len, text.splitlines())) <= 80
    block = krea(state, "status", "my [bold]run").stdout
    assert "to go on: krea-runner resume 'my [bold]run'" in block


LIVE = """\
[run]
name = "live run"
scheduler = "local"
command = ["{python}", "-m", "krea_runner.demo.train", "--steps", "100000", "--checkpoint-every", "5", "--step-time", "0.05"]
[gang]
nodes = 2
[checkpoint]
dir = "checkpoints"
"""


def test_live_run_from_submit_to_stop(state: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(LIVE.format(python=sys.executable))
    assert krea(state, "submit", str(tmp_path / "run.toml")).returncode == 0
    try:
        shown = wait_for(state, lambda run: run["step"] is not None and run["checkpoint_step"] is not None)
        assert (shown["state"], shown["job"]["state"], shown["attempt_number"]) == ("ACTIVE", "RUNNING", 1)
        assert shown["nodelist"] == "local[1-2]"
        assert shown["judgement"] == "seen for the first time: the next look tells whether it moves"
        assert (shown["restarts_used"], shown["restarts_max"]) == (0, 20)
        assert {rank["node"] for rank in shown["ranks"]} == {"local1", "local2"}
        assert shown["last_incident"] is shown["open_action"] is None

        assert krea(state, "supervise", "--once").returncode == 0
        watched = wait_for(state, lambda run: run["judgement"].startswith("in progress"))
        assert watched["last_beat_age_s"] is not None

        explained = json.loads(krea(state, "explain", "live run", "--json").stdout)
        assert explained["rules"][0]["rule"].startswith("no beat in")
        assert 0 < explained["rules"][0]["left_s"] <= explained["rules"][0]["budget_s"]
        assert explained["blind_for_s"] is None
        shown_to_people = krea(state, "explain", "live run").stdout
        assert "RULE" in shown_to_people
        assert re.search(r"step +5m00s +", shown_to_people)

        torn = tmp_path / "runs" / shown_slug(tmp_path) / "heartbeats" / "1.r0" / "zz.hb"
        torn.write_bytes(b"\xff" * 100)
        blind = wait_for(state, lambda run: run["could_not_see"] != [])
        assert blind["could_not_see"] == ["zz.hb slot 0: torn, or not a heartbeat"]
        assert "could not see: zz.hb slot 0: torn" in krea(state, "status").stdout
        assert "unseen      zz.hb slot 0: torn" in krea(state, "status", "live run").stdout
    finally:
        assert krea(state, "stop", "live run").returncode == 0
    assert "STOPPED" in krea(state, "status").stdout


def shown_slug(tmp_path: Path) -> str:
    (folder,) = (tmp_path / "runs").iterdir()
    return folder.name


def wait_for(state: Path, holds: Any) -> Any:
    deadline = time.monotonic() + 60
    while True:
        document = json.loads(krea(state, "status", "--json").stdout)
        assert document["schema_version"] == 1
        (run,) = document["runs"]
        if holds(run):
            return run
        assert time.monotonic() < deadline, run
