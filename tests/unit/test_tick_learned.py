"""What a run has learned, from tick to tick and from attempt to attempt."""

import dataclasses
from pathlib import Path

import pytest

from krea_runner.history.last_watch import last_watch
from krea_runner.history.store import open_history
from krea_runner.model import AttemptKey, Budgets, Learned, RunState
from krea_runner.rundir import RunDir

from .conftest import FakeClock, make_config
from .test_tick import RUNNING, Desk, Says


@pytest.fixture
def desk(tmp_path: Path, clock: FakeClock) -> Desk:
    history = open_history(tmp_path / "state")
    config = make_config(tmp_path, scheduler="slurm", budgets=Budgets())
    config.run_dir.mkdir()
    run = history.create_run(config, user="alice", tag="t", now=clock.wall())
    history.set_submitted(run.run_id, "7", now=clock.wall())
    return Desk(history, clock, Says(), run.run_id, RunDir(config.run_dir))


def steps_learned(desk: Desk) -> int:
    watch = last_watch(desk.history, desk.run_id)
    assert watch is not None
    steps = watch.learned.of("step")
    return 0 if steps is None else steps.count


def test_ticks_in_new_processes_go_on_learning_and_a_new_attempt_begins_with_what_the_last_one_knew(desk: Desk) -> None:
    for number in range(1, 30):
        desk.beat(number, flush=10 * number)
        desk.tick()
    learned = steps_learned(desk)
    assert learned > 15
    desk.tick(dataclasses.replace(RUNNING, restart_count=1))
    assert steps_learned(desk) == learned
    watch = last_watch(desk.history, desk.run_id)
    assert watch is not None
    assert (watch.attempt, watch.first_step) == (str(AttemptKey("7", 1)), None)


def test_becoming_slow_is_news_once_and_ends_nothing(desk: Desk) -> None:
    desk.beat(1, flush=1)
    desk.tick()
    (attempt,) = desk.history.attempts(desk.run_id)
    watch = desk.history.watch(attempt.attempt_id)
    assert watch is not None
    learned = Learned()
    for _ in range(4000):
        learned = learned.with_wait("step", 1.0, 1.0, 1.0)
    slow = dataclasses.replace(learned, recent_s=9.0, slow_for_s=595.0)
    desk.history.save_observations((attempt, dataclasses.replace(watch, first_step=-9, learned=slow)))
    news = []
    for number in range(2, 6):
        desk.beat(number, flush=10 * number)
        (line,) = desk.tick().lines
        assert line.text.startswith("slow, not hung: a step takes")
        news.append(line.news)
    assert news == [True, False, False, False]
    assert desk.state is RunState.ACTIVE
    assert desk.history.incidents(run_id=desk.run_id) == []
