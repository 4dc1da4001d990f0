import getpass
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from krea_runner.cli.doctor import file_system, run_checks, status_word
from krea_runner.history.store import open_history
from krea_runner.history.ticks import TickRecord, record_tick
from krea_runner.schedulers import Check

from .conftest import make_config

USER = getpass.getuser()


def doctor(state: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "krea_runner", "doctor", *argv], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "KREA_RUNNER_STATE_DIR": str(state)},
    )  # fmt: skip


def checks_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["ok"] is (done.returncode == 0)
    return {check["name"]: check for check in document["checks"]}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_healthy_host_is_ok(state: Path) -> None:
    open_history(state)
    done = doctor(state, "--scheduler", "local", "--json")
    checks = checks_of(done)
    assert done.returncode == 0, done.stdout
    assert {
        name: check["status"] for name, check in checks.items() if name not in {"clock", "free space", "file system"}
    } == {
        name: "ok"
        for name in (
            "python",
            "krea_runner",
            "state dir",
            "templates",
            "site.toml",
            "history",
            "supervisor",
            "local scheduler",
        )
    }


def test_a_wrong_site_toml_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text("signture = []\n")
    monkeypatch.setenv("KREA_RUNNER_SITE", str(tmp_path / "site.toml"))
    found = next(check for check in run_checks("local") if check.name == "site.toml")
    assert (found.ok, found.detail) == (
        False,
        "your own signatures have 1 problem; unknown key 'signture'; did you mean signatures?",
    )


def test_lines_in_a_pipe_are_plain_and_lead_with_the_word(state: Path) -> None:
    done = doctor(state, "--scheduler", "local")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert {line.split()[0] for line in done.stdout.splitlines()} <= {"ok", "warn"}
    assert "none yet: nothing was ever submitted" in done.stdout


def test_active_run_that_nobody_watches_fails_and_says_what_to_type(state: Path, tmp_path: Path) -> None:
    history = open_history(state)
    config = make_config(tmp_path)
    config.run_dir.mkdir()
    run = history.create_run(config, user=USER, tag="t", now=time.time())
    history.set_submitted(run.run_id, "1", now=time.time())

    never = doctor(state, "--scheduler", "local", "--json")
    assert never.returncode == 1
    supervisor = checks_of(never)["supervisor"]
    assert (supervisor["status"], supervisor["detail"]) == ("FAIL", "has never looked; 1 active run")
    assert "crontab -e: * * * * * /" in supervisor["hint"], "cron has no PATH to speak of"
    assert supervisor["hint"].endswith(" supervise --for 55s")

    record_tick(history, TickRecord("login1", USER, time.time() - 3600, ""))
    assert checks_of(doctor(state, "--scheduler", "local", "--json"))["supervisor"]["status"] == "FAIL"

    record_tick(history, TickRecord("login1", USER, time.time(), "llm: no answer"))
    blind = checks_of(doctor(state, "--scheduler", "local", "--json"))["supervisor"]
    assert blind["status"] == "warn"
    assert "could not see: llm: no answer" in blind["detail"]

    record_tick(history, TickRecord("login1", USER, time.time(), ""))
    watched = doctor(state, "--scheduler", "local", "--json")
    assert watched.returncode == 0
    assert checks_of(watched)["supervisor"]["status"] == "ok"


def test_run_directory_that_is_gone_fails(state: Path, tmp_path: Path) -> None:
    history = open_history(state)
    run = history.create_run(make_config(tmp_path), user=USER, tag="t", now=time.time())
    history.set_submitted(run.run_id, "1", now=time.time())
    check = checks_of(doctor(state, "--scheduler", "local", "--json"))["run dir"]
    assert check["status"] == "FAIL"
    assert check["hint"] == f"ls -ld {tmp_path / 'run'}"


def test_state_directory_that_cannot_be_made_fails_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = doctor(tmp_path / "file" / "state", "--scheduler", "local", "--json")
    assert done.returncode == 1
    assert done.stderr == ""
    assert checks_of(done)["state dir"]["status"] == "FAIL"
    assert "KREA_RUNNER_STATE_DIR" in checks_of(done)["state dir"]["hint"]


def test_damaged_history_fails_and_stays_as_it_is(state: Path) -> None:
    history = open_history(state)
    data = bytearray(history.path.read_bytes())
    page = 4096
    data[page * 2 : page * 4] = b"\x5a" * (2 * page)
    history.path.write_bytes(data)
    done = doctor(state, "--scheduler", "local", "--json")
    assert done.returncode == 1
    assert checks_of(done)["history"]["status"] == "FAIL"
    assert history.path.read_bytes() == data


def test_unknown_scheduler_is_a_failed_check() -> None:
    *_, last = run_checks("nonsense")
    assert (last.name, last.ok, last.hint) == ("nonsense", False, "use one of: slurm, local")


def test_check_that_is_ok_with_a_hint_is_a_warning() -> None:
    assert [status_word(Check("x", *rest)) for rest in ((True, ""), (True, "", "do"), (False, "", "do"))] == [
        "ok", "warn", "FAIL",
    ]  # fmt: skip


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime shared:2 - nfs4 srv:/home rw,vers=4.2,local_lock=none
31 22 0:41 / /scratch rw shared:3 - nfs srv:/scratch rw,vers=3,nolock,local_lock=all
32 22 0:42 / /with\\040blank rw - lustre mgs:/fs rw,noflock
33 22 0:43 / /hom rw - tmpfs tmpfs rw
34 22 0:44 / /odd rw master:1
"""


@pytest.mark.parametrize(
    ("folder", "kind", "lockless"),
    [
        ("/var/lib", "ext4", set()),
        ("/home/me/.local/state", "nfs4", set()),
        ("/home", "nfs4", set()),
        ("/scratch/me", "nfs", {"nolock", "local_lock=all"}),
        ("/with blank/x", "lustre", {"noflock"}),
    ],
)
def test_file_system_is_that_of_the_longest_mount(folder: str, kind: str, lockless: set[str]) -> None:
    found, options = file_system(Path(folder), MOUNTS)
    assert found == kind
    assert options & {"nolock", "local_lock=all", "noflock"} == lockless
