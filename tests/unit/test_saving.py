"""How a run saves, and the warnings: in time, once an episode, none from what is not known."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from krea_runner.decide.saving import (
    BEFORE_LIMIT,
    FROM_NOTHING,
    KINDS,
    LATE_SAVE,
    NO_ROOM,
    SHRINKING,
    STALLED_SAVE,
    from_nothing,
    saving_troubles,
)
from krea_runner.history.store import open_history
from krea_runner.history.warnings import list_warnings, settle_warnings
from krea_runner.model import Attempt, AttemptKey, CheckpointSpec, RunState, Saves
from krea_runner.observe.checkpoints import read_checkpoints
from krea_runner.observe.checkpoints.saves import read_saves
from krea_runner.report.saving import saving_lines
from krea_runner.rundir import RunDir

from .conftest import make_config
from .test_cli_status_history import USER, krea
from .test_tick import Desk, Says

NOW = 1_800_000_000.0
HEALTHY = Saves(
    written_at=(NOW - 100, NOW - 1000, NOW - 1900), sizes_bytes=(1000, 1000), files=2, took_s=20.0, free_bytes=10_000,
    free_files=100, limit_at=NOW + 36_000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, []),
        ({"free_bytes": 1999}, [NO_ROOM]),
        ({"free_files": 3}, [NO_ROOM]),
        ({"free_files": None}, []),
        ({"sizes_bytes": (700, 1000)}, [SHRINKING]),
        ({"sizes_bytes": (700,)}, []),
        ({"written_at": (NOW - 2800, NOW - 3700, NOW - 4600)}, [LATE_SAVE]),
        ({"written_at": (NOW - 2800,)}, []),
        ({"growing": "step_9", "growing_at": NOW - 700}, [STALLED_SAVE]),
        ({"growing": "step_9", "growing_at": NOW - 500}, []),
        ({"growing": "step_9", "growing_at": NOW - 700, "took_s": 400.0}, []),
        ({"limit_at": NOW + 815}, [BEFORE_LIMIT]),
        ({"limit_at": NOW + 825}, []),
        ({"limit_at": None}, []),
    ],
)
def test_each_trouble_is_told_from_its_numbers(change, kinds) -> None:
    found = saving_troubles(dataclasses.replace(HEALTHY, **change), now=NOW, started_at=NOW - 9000)
    assert list(found) == kinds


def test_what_was_saved_before_a_restart_is_not_late() -> None:
    old = dataclasses.replace(HEALTHY, written_at=(NOW - 9000, NOW - 9900), limit_at=None)
    assert saving_troubles(old, now=NOW, started_at=NOW - 60) == {}


@pytest.mark.parametrize(
    ("first", "loaded", "oldest", "says"),
    [
        (300, 300, 100, ""),
        (299, 300, 100, ""),
        (0, 300, 100, "resumed from nothing"),
        (200, 300, 100, "resumed from an older checkpoint"),
        (0, None, None, ""),
        (None, 300, 100, ""),
    ],
)
def test_where_an_attempt_began_is_held_against_what_it_was_given(first, loaded, oldest, says) -> None:
    attempt = Attempt(1, 1, AttemptKey("7"), NOW, first_step=first)
    assert from_nothing(attempt, loaded, oldest).startswith(says)
    assert bool(from_nothing(attempt, loaded, oldest)) == bool(says)


@pytest.fixture
def history(tmp_path):
    history = open_history(tmp_path / "state")
    history.create_run(make_config(tmp_path), user="alice", tag="t", now=NOW)
    return history


def settle(history, found, at, attempt="7.r0", looked_for=KINDS):
    return settle_warnings(history, 1, attempt, dict.fromkeys(found, "x"), looked_for=looked_for, now=NOW + at)


def test_an_episode_is_told_once_and_ends_when_it_is_over(history) -> None:
    assert settle(history, [NO_ROOM], 0) == ["x"]
    assert settle(history, [NO_ROOM], 60) == []
    assert settle(history, [], 120) == []
    assert [one.ended_at for one in list_warnings(history, 1)] == [NOW + 120]
    assert settle(history, [NO_ROOM], 180) == []  # it hovers about the border: the same episode
    assert len(list_warnings(history, 1, open_only=True)) == 1
    settle(history, [], 240)
    assert settle(history, [NO_ROOM], 240 + 3600) == ["x"]
    assert len(list_warnings(history, 1)) == 2


def test_what_could_not_be_looked_for_goes_on(history) -> None:
    settle(history, [NO_ROOM], 0)
    settle(history, [], 60, looked_for={FROM_NOTHING})
    assert len(list_warnings(history, 1, open_only=True)) == 1


def test_the_next_attempt_begins_afresh(history) -> None:
    settle(history, [FROM_NOTHING], 0)
    assert settle(history, [FROM_NOTHING], 60, attempt="7.r1") == ["x"]
    assert [one.attempt for one in list_warnings(history, 1, open_only=True)] == ["7.r1"]


def save(directory: Path, step: int, at: float, size: int = 1000, whole: bool = True) -> None:
    folder = directory / f"step_{step}"
    folder.mkdir(parents=True)
    for name, when in (("a.bin", at - 10), ("b.bin", at), *([("COMPLETE", at)] if whole else [])):
        (folder / name).write_bytes(bytes(0 if name == "COMPLETE" else size))
        os.utime(folder / name, (when, when))


def test_a_directory_is_read_as_saves(tmp_path) -> None:
    spec = CheckpointSpec(directory=tmp_path / "ckpt")
    assert read_saves(spec, read_checkpoints(spec)) == Saves()
    for step, ago in ((1, 300), (2, 200), (3, 100)):
        save(spec.directory, step, NOW - ago, size=1000 * step)
    save(spec.directory, 4, NOW - 5, size=500, whole=False)
    saves = read_saves(spec, read_checkpoints(spec), limit_at=NOW + 90)
    assert saves.written_at == (NOW - 100, NOW - 200, NOW - 300)
    assert (saves.sizes_bytes, saves.files, saves.took_s, saves.interval_s) == ((6000, 4000), 3, 10.0, 100.0)
    assert (saves.growing, saves.growing_bytes, saves.growing_at) == ("step_4", 1000, NOW - 5)
    assert saves.bytes_per_s == 600.0
    assert saves.room is not None
    said = [text for _, text, _ in saving_lines(saves, [], NOW)]
    assert said[0] == "100 s ago, 6.0 kB in 10.0s (600 B/s), +50.0% against the one before, every 1m40s"
    assert said[1] == "step_4: 1.0 kB of 6.0 kB, last written 5 s ago"
    assert said[2].endswith("free); time limit in 1m30s, a save takes 10.0s")


@pytest.fixture
def desk(tmp_path, clock) -> Desk:
    history = open_history(tmp_path / "state")
    config = make_config(tmp_path, scheduler="slurm")
    config.run_dir.mkdir()
    run = history.create_run(config, user="alice", tag="t", now=clock.wall())
    history.set_submitted(run.run_id, "7", now=clock.wall())
    return Desk(history, clock, Says(), run.run_id, RunDir(config.run_dir))


def test_a_run_that_began_from_nothing_is_told_once_and_shown(desk: Desk, tmp_path) -> None:
    ckpt, key = tmp_path / "ckpt", AttemptKey("7")
    for step, ago in ((100, 400), (200, 300), (300, 200)):
        save(ckpt, step, desk.clock.wall() - ago)
    desk.run_dir.events.mkdir(parents=True)
    start = {"event": "attempt_start", "attempt": str(key), "at": desk.clock.wall(), "resume_step": 300}
    desk.run_dir.script_events(key).write_text(json.dumps(start) + "\n")
    desk.beat(2, flush=1)
    (line,) = desk.tick().lines
    assert line.news
    assert "resumed from nothing: its first step was 2, though step 300 was there to be loaded" in line.text
    for step in range(3, 10):
        desk.beat(step, flush=step)
        assert not any(one.news for one in desk.tick().lines)
    assert [one.kind for one in list_warnings(desk.history, desk.run_id, open_only=True)] == [FROM_NOTHING]


def test_a_dry_run_puts_no_warning_on_record(desk: Desk, tmp_path) -> None:
    for step, size in ((1, 1000), (2, 100)):
        save(tmp_path / "ckpt", step, desk.clock.wall() - 10 / step, size=size)
    desk.dry_run = True
    desk.tick()
    assert list_warnings(desk.history, desk.run_id) == []
    desk.dry_run = False
    assert "holds 10% of what" in desk.tick().lines[0].text


def test_status_of_a_run_shows_its_saves_and_what_is_wrong_with_them(tmp_path) -> None:
    state = tmp_path / "state"
    history = open_history(state)
    run = history.create_run(make_config(tmp_path), user=USER, tag="t", now=NOW)
    history.set_run_state(run.run_id, RunState.DONE, "completed", now=NOW)
    settle(history, [NO_ROOM], 0)
    for step in (1, 2):
        save(tmp_path / "ckpt", step, NOW + step)
    said = krea(state, "status", "llm").stdout
    assert re.search(r"2\.0 kB in 10\.0s \(200 B/s\), \+0\.0% against the one before, every 1\.0s", said), said
    assert re.search(r"^warning +x \(first seen", said, re.M)
    (shown,) = json.loads(krea(state, "status", "llm", "--json").stdout)["runs"]
    assert (shown["saves"]["sizes_bytes"], [one["kind"] for one in shown["warnings"]]) == ([2000, 2000], [NO_ROOM])
