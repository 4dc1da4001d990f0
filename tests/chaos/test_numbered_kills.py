"""The short form of kills.py: a supervisor killed at numbered points of its ticks changes nothing about how a run ends."""

import random

import pytest

from tests.chaos.kills import Played, killed_often, killed_once, undisturbed

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def crash() -> Played:
    return undisturbed("crash", "local")


def test_undisturbed_a_crash_is_one_incident_and_one_requeue(crash: Played) -> None:
    assert (crash.end["state"], crash.end["starts"]) == ("DONE", 2)
    assert crash.end["incidents"] == [("crash", "rank_failed", "REQUEUE")]
    assert crash.end["actions"] == [("REQUEUE", "DONE")]
    assert crash.points > 40


@pytest.mark.parametrize("part", [0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.8])
def test_killed_at_any_point_a_run_ends_as_undisturbed(crash: Played, part: float) -> None:
    """Around the middle lies the requeue: before and after the intent, the effect, and each file of the scheduler's own."""
    killed = killed_once("crash", "local", round(crash.points * part))
    assert killed.end == crash.end, killed.kills


def test_killed_again_and_again_a_run_ends_as_undisturbed() -> None:
    whole = undisturbed("again", "local")
    killed = killed_often("again", "local", whole.points // 3, random.Random(7))
    assert killed.kills
    assert killed.end == whole.end, killed.kills
