"""The demo is run, as a user would. What it claims is checked from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from krea_runner.demo.play import CHECKPOINT_EVERY, STEPS, write_play


def start(tmp_path: Path, *argv: str) -> subprocess.Popen[str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "krea_runner", "demo", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "KREA_RUNNER_STATE_DIR": str(tmp_path / "not-this")},
    )  # fmt: skip


def processes_of(tmp_path: Path) -> list[str]:
    """Command lines of what still runs with something below `tmp_path` in its environment or arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if str(tmp_path).encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10  # a killed process is in /proc until its parent has read its end
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_demo_survives_both_faults_with_identical_weights(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = start(tmp_path, "--seed", "7", "--dir", str(kept))
    out, err = done.communicate(timeout=150)
    assert (done.returncode, err) == (0, ""), out + err
    assert "\x1b" not in out
    kinds = re.findall(r"^ *[\d.]+s  (\w+) ", out, re.MULTILINE)
    for kind, count in {"FAULT": 2, "notice": 2, "decide": 2, "act": 2, "resume": 2, "end": 2}.items():
        assert kinds.count(kind) == count, out
    assert kinds.index("FAULT") < kinds.index("notice") < kinds.index("decide") < kinds.index("resume")
    faults = re.findall(r"FAULT   (SIG\w+) to rank (\d)", out)
    assert [name for name, _ in faults] == ["SIGSTOP", "SIGKILL"]
    assert f"notice  hang: rank {faults[0][1]} on local" in out
    table = re.findall(r"^\d{4}-\S+Z  demo +(\S+) .* (hang|crash) .* REQUEUE ", out, re.MULTILINE)
    assert table == [("1.r0", "hang"), ("1.r1", "crash")]
    assert not (tmp_path / "not-this").exists(), "the demo keeps to its own state"
    assert processes_of(tmp_path) == []

    # Its claims, from its files and by the other verbs.
    final = [json.loads((kept / name / "checkpoints" / "final.json").read_text()) for name in ("demo", "undisturbed")]
    assert final[0] == final[1]
    assert f"final weights: identical (sha256 {final[0]['sha256']})\n" in out
    assert f"KREA_RUNNER_STATE_DIR={kept}/state krea-runner status --all" in out
    status = subprocess.run(
        [sys.executable, "-m", "krea_runner", "status", "--all", "--json"], capture_output=True, text=True, check=True,
        env={**os.environ, "KREA_RUNNER_STATE_DIR": str(kept / "state")},
    )  # fmt: skip
    runs = {run["name"]: run for run in json.loads(status.stdout)["runs"]}
    assert {name: (run["state"], run["step"], run["attempt_number"]) for name, run in runs.items()} == {
        "demo": ("DONE", STEPS, 3),
        "undisturbed": ("DONE", STEPS, 1),
    }
    assert runs["undisturbed"]["last_incident"] is None


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing_behind_not_even_a_frozen_rank(tmp_path: Path, number: signal.Signals) -> None:
    done = start(tmp_path, "--seed", "7")
    assert done.stdout is not None
    for line in done.stdout:
        if "FAULT" in line:
            break
    done.send_signal(number)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 130, out + err
    assert "interrupted: all jobs of the demo are ended" in err


def test_directory_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = start(tmp_path, "--dir", str(tmp_path))
    _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert err == f"krea-runner: error: {tmp_path} is not empty\n  name a directory that does not exist yet\n"
    assert (tmp_path / "mine").read_text() == "precious"


def test_play_depends_on_the_seed_alone_and_leaves_room_for_checkpoints() -> None:
    assert write_play(Path("a"), 5).faults == write_play(Path("b"), 5).faults
    plays = [write_play(Path("x"), seed) for seed in range(200)]
    assert {fault.rank for play in plays for fault in play.faults} == {0, 1, 2, 3}
    for play in plays:
        freeze, kill = play.faults
        assert CHECKPOINT_EVERY < freeze.at_step < kill.at_step - CHECKPOINT_EVERY
        assert kill.at_step < STEPS - 2 * CHECKPOINT_EVERY
