"""The detector against whole runs on a virtual clock, in short; `python -m tests.bench.bench_hang` is the long form.

Defaults only: a run.toml without [budgets]."""

import dataclasses
import math
import zlib

import pytest

from krea_runner.diagnose import hang as hang_module
from krea_runner.model import learned as learned_module
from krea_runner.model import observation as observation_module
from krea_runner.observe import watch as watch_module
from tests.cases.traces.kinds import HANGS, HEALTHY, WATCHING
from tests.cases.traces.replay import healthy, hung

SLOWEST_S = 45 * 60.0  # the budget for starting without any history, and a pause of the watcher


def seed_of(*words: str) -> int:
    return zlib.crc32(" ".join(words).encode())


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize(("watching", "hours"), [("cron", 3), ("paused", 0.6), ("moving", 1)])
def test_a_healthy_run_is_never_called_hung(kind: str, watching: str, hours: float) -> None:
    outcome = healthy(HEALTHY[kind], WATCHING[watching], seed_of(kind, watching), hours)
    assert outcome.killed is None
    assert outcome.hours > hours * 0.99


@pytest.mark.parametrize("kind", HANGS)
@pytest.mark.parametrize(("watching", "hours"), [("cron", 1.5), ("loop, 10 s", 0.2)])
def test_a_hang_is_noticed_and_told_apart_from_others(kind: str, watching: str, hours: float) -> None:
    outcome = hung(HANGS[kind], WATCHING[watching], seed_of(kind, watching), hours)
    assert outcome.noticed_s is not None, outcome.killed
    assert outcome.noticed_s < SLOWEST_S
    assert outcome.killed is not None
    assert outcome.killed.cause == HANGS[kind].cause, outcome.killed.summary
    assert "\n" not in outcome.killed.summary


def test_traces_hold_when_slots_are_written_and_read_by_the_real_reader(tmp_path) -> None:
    kind = "everything at once"
    assert healthy(HEALTHY[kind], WATCHING["files"], 1, 0.7, tmp_path / "h").killed is None
    outcome = hung(HANGS["node silent"], WATCHING["files"], 2, 0.3, tmp_path / "n")
    assert outcome.noticed_s is not None
    assert outcome.killed is not None
    assert outcome.killed.cause == "node_silent"


def test_an_hour_of_healthy_steps_makes_a_hang_noticed_sooner_and_so_does_an_earlier_attempt() -> None:
    hang, how = HANGS["one rank stopped"], WATCHING["loop, 10 s"]
    young = hung(hang, how, 5, 0.3)
    earlier = healthy(hang.shape, how, 6, 1.5).watch
    second = hung(hang, how, 5, 0.3, memory=earlier)
    assert young.noticed_s is not None
    assert second.noticed_s is not None
    assert young.noticed_s > 290
    assert second.noticed_s < 140


def test_a_gang_that_goes_on_far_slower_is_called_slow_and_left_alone() -> None:
    shape = dataclasses.replace(HEALTHY["fail-slow, 8 times"], slower_at_s=1.5 * 3600)
    outcome = healthy(shape, WATCHING["loop, 10 s"], 3, 2.2)
    assert outcome.killed is None
    assert any("slow, not hung" in line for line in outcome.slow_lines)


@pytest.mark.parametrize(
    "kind", ["steps of 2 s", "slow steps", "very uneven steps", "20-minute checkpoints", "NFS lumps"]
)
def test_a_healthy_gang_is_not_called_slow(kind: str) -> None:
    assert not healthy(HEALTHY[kind], WATCHING["cron"], 4, 5).slow_lines


RULES = learned_module.RULES
# What protects a healthy run, and a run that is killed without it: the harness must be able to turn red.
PROTECTIONS = [
    ("second signal", hang_module, "second_signal", lambda *_: "it is late", "file system away 1 to 8 min", "loop, 10 s", 4),
    ("longer wait of all silent", hang_module, "ALL_SILENT_S", 0.0, "file system away 1 to 8 min", "loop, 10 s", 4),
    ("cap of a look", watch_module, "LOOK_CAP_S", math.inf, "file system away 1 to 8 min", "paused", 6),
    ("least of a step", learned_module, "RULES", {**RULES, "step": dataclasses.replace(RULES["step"], floor_s=30)},
     "a rare pause", "loop, 10 s", 4),
    ("an hour of learning", learned_module, "RULES", {**RULES, "step": dataclasses.replace(RULES["step"], watched_s=0)},
     "long pauses, undeclared", "loop, 10 s", 2),
    ("warm-up", observation_module, "WARM_UP_STEPS", 0, "compile pauses", "loop, 10 s", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "name", "without", "kind", "watching", "hours"),
    [case[1:] for case in PROTECTIONS],
    ids=[case[0] for case in PROTECTIONS],
)
def test_without_any_one_protection_a_healthy_run_would_be_killed(
    monkeypatch, place, name, without, kind, watching, hours
) -> None:
    monkeypatch.setattr(place, name, without)
    killed = [healthy(HEALTHY[kind], WATCHING[watching], seed, hours).killed for seed in range(3)]
    assert any(killed)
