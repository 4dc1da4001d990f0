"""`krea-runner check` as it is typed, and what `submit` makes of the same findings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BAD = "#!/bin/bash\n#SBATCH --requeue --open-mode=append\nsrun -K --label ./solver | cat\n"
RUN = '[run]\nname = "job"\ncommand = {command}\nscheduler = "local"\n'


@pytest.fixture
def krea(tmp_path: Path):
    """Runs the program in `tmp_path`, with no Slurm on PATH."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        env = {"HOME": str(tmp_path), "KREA_RUNNER_STATE_DIR": str(tmp_path / "state"), "PATH": str(tools)}
        argv = [sys.executable, "-m", "krea_runner", *words]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60)

    return run


def test_findings_name_line_harm_and_fix_and_exit_1(tmp_path: Path, krea) -> None:
    (tmp_path / "job.sbatch").write_text(BAD)
    done = krea("check", "job.sbatch")
    assert done.returncode == 1
    assert "error    job.sbatch:3  [pipe-hides-exit]\n  srun -K --label ./solver | cat\n" in done.stdout
    assert "  → set -o pipefail" in done.stdout
    assert "not judged: preempted-by-cancel" in done.stdout
    assert "cannot run scontrol" in done.stdout


def test_json_has_a_schema_version_and_all_of_a_finding(tmp_path: Path, krea) -> None:
    (tmp_path / "job.sbatch").write_text(BAD)
    document = json.loads(krea("check", "job.sbatch", "--json").stdout)
    assert document["schema_version"] == 1
    [finding] = [each for each in document["findings"] if each["code"] == "pipe-hides-exit"]
    assert (finding["severity"], finding["path"], finding["line"]) == ("error", "job.sbatch", 3)
    assert set(finding) == {"code", "severity", "path", "line", "text", "harm", "saw", "fix"}
    assert "preempted-by-cancel" in document["not_judged"]


NOTED = """#!/bin/bash
#SBATCH --requeue --open-mode=append --time=1-0 --output=/dev/null
unset SLURM_CPU_BIND
srun --kill-on-bad-exit=1 python train.py
"""


def test_notes_alone_exit_0(tmp_path: Path, krea) -> None:
    (tmp_path / "job.sbatch").write_text(NOTED)
    done = krea("check", "job.sbatch")
    assert (done.returncode, "[no-flight-recorder]" in done.stdout, "1 note" in done.stdout) == (0, True, True)
    (tmp_path / "run.toml").write_text(
        RUN.format(command='["python", "train.py"]')
    )  # our script sets what that asks for
    done = krea("check", "run.toml")
    assert (done.returncode, done.stdout) == (0, "run.toml: nothing found\n")


@pytest.mark.parametrize(
    ("name", "content"), [("run.toml", "[run"), ("run.toml", "[run]\n"), ("none.sbatch", None), ("x.sbatch", "\0")]
)
def test_a_file_that_cannot_be_read_is_78(tmp_path: Path, krea, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    done = krea("check", name)
    assert (done.returncode, name in done.stderr) == (78, True)


def test_a_wrong_duration_is_a_matter_of_usage_and_says_how_they_look(tmp_path: Path, krea) -> None:
    (tmp_path / "job.sbatch").write_text(BAD)
    done = krea("check", "job.sbatch", "--checkpoint-every", "soon")
    assert (done.returncode, "1h30m" in done.stderr) == (2, True)


def test_nothing_from_the_script_moves_the_cursor(tmp_path: Path, krea) -> None:
    (tmp_path / "job.sbatch").write_text(BAD.replace("./solver", "./sol\x1b[2Jver"))
    assert "\x1b" not in krea("check", "job.sbatch").stdout


def test_submit_refuses_an_error_and_records_nothing(tmp_path: Path, krea) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(command='"python train.py | cat"'))
    done = krea("submit", "run.toml")
    assert done.returncode == 1
    line, *rest = done.stderr.splitlines()
    assert line.startswith("krea-runner: error: run.toml:3: A crash reads as COMPLETED 0:0")
    assert line.endswith("[pipe-hides-exit]")
    assert rest[0] == "krea-runner: error: not submitted: 1 error in run.toml"
    assert not (tmp_path / "state").exists()


def test_submit_without_the_check_says_it_and_submits(tmp_path: Path, krea) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(command='"python3 -c 1 | cat"'))
    done = krea("submit", "run.toml", "--no-check", "--json")
    assert done.returncode == 0
    assert "[pipe-hides-exit]" in done.stderr
    assert json.loads(done.stdout)["run"] == "job"
    krea("stop", "job")


def test_checkpoints_that_are_there_say_how_often_they_are_written(tmp_path: Path, krea) -> None:
    more = '[slurm]\ntime = "50"\n[budgets]\nstartup = "1m"\ncheckpoint = "1m"\n[checkpoint]\ndir = "ckpt"\n'
    (tmp_path / "run.toml").write_text(RUN.format(command='["true"]') + more)
    assert krea("check", "run.toml").returncode == 0
    for step in range(4):
        marker = tmp_path / "ckpt" / f"step_{step}" / "COMPLETE"
        marker.parent.mkdir(parents=True)
        marker.touch()
        os.utime(marker, (step * 3600, step * 3600))
    done = krea("check", "run.toml")
    assert done.returncode == 1
    assert "[limit-below-checkpoint]" in done.stdout
    assert "interval 60 min" in done.stdout


def test_the_reference_page_is_what_the_rules_are() -> None:
    argv = [sys.executable, ROOT / "scripts" / "make-reference", "--print", "check"]
    made = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / "reference" / "check.md").read_text() == made.stdout, "run scripts/make-reference"
