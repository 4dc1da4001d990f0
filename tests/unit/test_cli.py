"""The verbs that change something, as a person types them, on the local scheduler."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from krea_runner import __version__
from krea_runner.history.store import open_history
from krea_runner.model import RunState
from krea_runner.schedulers.local import LocalScheduler
from tests.conftest import until

RUN = """
[run]
name = "sleepy"
command = ["sleep", "600"]
scheduler = "local"
dir = "run"
"""


@dataclass
class Shell:
    folder: Path

    def krea(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "krea_runner", *words], cwd=self.folder, capture_output=True, text=True, check=False,
            env={**os.environ, "KREA_RUNNER_STATE_DIR": str(self.folder / "state"), **env}, timeout=60,
        )  # fmt: skip

    def write(self, text: str, name: str = "run.toml") -> str:
        (self.folder / name).write_text(text)
        return name

    @property
    def jobs(self) -> LocalScheduler:
        return LocalScheduler(self.folder / "state" / "local")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for job_id in map(str, range(1, 10)):
        shell.jobs.cancel(job_id)
        until(lambda job_id=job_id: all(job.state.is_ended for job in shell.jobs.jobs([job_id]).values()), "the end")


def test_version(shell: Shell) -> None:
    for flag in ("--version", "-V"):
        assert shell.krea(flag).stdout == f"krea-runner {__version__}\n"
    assert shell.krea("--state-dir", "x", "--version").stdout == f"krea-runner {__version__}\n"


def test_submit_says_what_to_type_next_and_a_second_one_is_refused(shell: Shell) -> None:
    shell.write(RUN)
    first = shell.krea("submit", "run.toml")
    assert first.returncode == 0, first.stderr
    assert "submitted 'sleepy' as job 1 (local), 1 nodes" in first.stdout
    assert "krea-runner supervise" in first.stdout
    second = shell.krea("submit", "run.toml")
    assert second.returncode == 1
    assert "a run is alive in" in second.stderr
    assert "krea-runner stop" in second.stderr
    assert shell.jobs.jobs(["2"]) == {}


def test_submit_as_json(shell: Shell) -> None:
    shell.write(RUN)
    document = json.loads(shell.krea("submit", "run.toml", "--json").stdout)
    assert (document["schema_version"], document["run"], document["job_id"]) == (1, "sleepy", "1")


def test_submit_dry_run_prints_the_script_and_touches_nothing(shell: Shell) -> None:
    shell.write(RUN)
    done = shell.krea("submit", "run.toml", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH --requeue" in done.stdout
    assert sorted(path.name for path in shell.folder.iterdir()) == ["run.toml"]


def test_a_dry_run_says_in_json_what_it_would_do(shell: Shell) -> None:
    shell.write('[run]\nname = "x"\ncommand = ["true"]\n')
    document = json.loads(shell.krea("submit", "run.toml", "--dry-run", "--json").stdout)
    assert (document["run"], document["script"].startswith("#!/bin/bash\n")) == ("x", True)
    assert sorted(path.name for path in shell.folder.iterdir()) == ["run.toml"]


def test_a_pipe_is_no_run_toml(shell: Shell) -> None:
    os.mkfifo(shell.folder / "run.toml")
    done = shell.krea("submit", "run.toml")
    assert (done.returncode, "not a regular file" in done.stderr) == (78, True)


def test_a_wrong_file_names_every_key_its_line_and_the_right_one(shell: Shell) -> None:
    shell.write('[run]\nnme = "x"\ncommand = ["true"]\n[gang]\nnods = 2\n')
    done = shell.krea("submit", "run.toml")
    assert done.returncode == 78
    assert re.search(r"line 2: \[run\] unknown key 'nme'; did you mean name\?", done.stderr)
    assert re.search(r"line 5: \[gang\] unknown key 'nods'; did you mean nodes\?", done.stderr)
    assert "name is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_sbatch_nothing_is_submitted_and_it_can_be_tried_again(shell: Shell) -> None:
    shell.write(RUN.replace('"local"', '"slurm"'))
    for _ in range(2):
        done = shell.krea("submit", "run.toml", PATH="/nonexistent")
        assert done.returncode == 69
        assert "sbatch is not on PATH" in done.stderr
    assert {run.state for run in open_history(shell.folder / "state").list_runs()} == {RunState.STOPPED}


def test_a_run_directory_that_cannot_be_made_is_said(shell: Shell) -> None:
    shell.write(RUN)
    (shell.folder / "run").write_text("in the way")
    done = shell.krea("submit", "run.toml")
    assert done.returncode == 1
    assert "preparing the run directory" in done.stderr
    assert shell.krea("submit", "run.toml").stderr == done.stderr


def test_stop_cancels_for_good(shell: Shell) -> None:
    shell.write(RUN)
    shell.krea("submit", "run.toml")
    assert "would stop 'sleepy'" in shell.krea("stop", "sleepy", "--dry-run").stdout
    done = shell.krea("stop", "sleepy")
    assert done.stdout == "stopped 'sleepy', job 1 is CANCELLED\n"
    again = shell.krea("stop", "sleepy", "--json")
    assert json.loads(again.stdout)["state"] == "STOPPED"
    assert shell.krea("supervise", "--once").stdout == ""
    assert shell.jobs.jobs(["1"])["1"].restart_count == 0


def test_a_held_run_is_explained_and_resumed(shell: Shell) -> None:
    shell.write(RUN.replace('["sleep", "600"]', '["bash", "-c", "exit 93"]'))
    shell.krea("submit", "run.toml")
    until(lambda: shell.jobs.jobs(["1"])["1"].state.is_ended, "the end")
    held = shell.krea("supervise", "--once")
    assert "HOLD: exit code 93 means: do not restart" in held.stdout
    assert "krea-runner resume" in shell.krea("status").stdout
    assert "would requeue job 1" in shell.krea("resume", "sleepy", "--dry-run").stdout
    assert shell.krea("resume", "sleepy").returncode == 0
    shell.krea("supervise", "--once")
    assert shell.jobs.jobs(["1"])["1"].restart_count == 1
    refused = shell.krea("resume", "sleepy")
    assert (refused.returncode, "not HELD" in refused.stderr) == (1, True)


@pytest.mark.parametrize("verb", ["stop", "resume", "status"])
def test_an_unknown_run_is_not_found(shell: Shell, verb: str) -> None:
    shell.write(RUN)
    shell.krea("submit", "run.toml")
    done = shell.krea(verb, "nobody")
    assert done.returncode == 3
    assert "nobody" in done.stderr


@pytest.mark.parametrize(
    "words",
    [["supervise"], ["supervise", "--once", "--every", "5s"], ["submit"], ["no-such-verb"], ["stop", "--nonsense"]],
)
def test_wrong_words_are_a_usage_error(shell: Shell, words: list[str]) -> None:
    done = shell.krea(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_wrong_duration_says_how_they_look(shell: Shell) -> None:
    done = shell.krea("supervise", "--every", "soon")
    assert done.returncode == 2
    assert "1h30m" in done.stderr


def test_a_quiet_tick_prints_nothing_and_a_verbose_one_a_line_a_run(shell: Shell) -> None:
    shell.write(RUN)
    shell.krea("submit", "run.toml")
    assert shell.krea("supervise", "--once").stdout == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d sleepy: .+\n", shell.krea("supervise", "--once", "--verbose").stdout)


def test_a_blind_tick_says_so_once_and_exits_75_each_time(shell: Shell) -> None:
    shell.write(RUN)
    shell.krea("submit", "run.toml")
    state = shell.folder / "state" / "local" / "jobs" / "1" / "job.json"
    whole = state.read_text()
    state.write_text("{")
    first, second = shell.krea("supervise", "--once"), shell.krea("supervise", "--once")
    assert (first.returncode, second.returncode) == (75, 75)
    assert "could not see" in first.stdout
    assert second.stdout == ""
    state.write_text(whole)
    assert shell.krea("supervise", "--once").returncode == 0


def test_a_state_directory_that_cannot_be_made_says_what_to_type(shell: Shell) -> None:
    (shell.folder / "state").write_text("in the way")
    done = shell.krea("supervise", "--once")
    assert done.returncode == 75
    assert "KREA_RUNNER_STATE_DIR" in done.stderr
    (shell.folder / "state").unlink()
