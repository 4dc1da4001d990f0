"""What healthy waits teach, what never does, and what is said of it."""

import dataclasses
import json
from dataclasses import asdict

import pytest

from krea_runner.diagnose.explain import explain_hang
from krea_runner.diagnose.hang import judge_hang
from krea_runner.history.watches import watch_from_text, watch_to_text
from krea_runner.model import Budgets, Learned
from krea_runner.model.learned import PHASES_KEPT, RULES

AUTO = Budgets()
ALL = {0, 1, 2, 3}


def after(phase: str, *waits_s: float, during_s: float | None = None) -> Learned:
    learned = Learned()
    for wait_s in waits_s:
        learned = learned.with_wait(phase, wait_s, wait_s, wait_s if during_s is None else during_s)
    return learned


@pytest.mark.parametrize("phase", [*RULES, "anything"])
def test_without_history_a_phase_has_the_value_that_is_safe_for_a_stranger(phase: str) -> None:
    budget = Learned().budget(phase, AUTO)
    assert (budget.seconds, budget.why) == (AUTO.for_phase(phase), "nothing learned yet")


@pytest.mark.parametrize(
    ("waits_s", "during_s", "seconds", "why"),
    [
        ([2.0] * 19, 200, 300, "still learning, 19 of 20 waits seen"),
        ([2.0] * 20, 150, 300, "still learning, 50 of 60 min seen"),
        ([2.0] * 40, 150, 120, "the least for this phase"),
        ([64.0] * 60, None, 320, "5 times the usual 64.0 s"),
        (([32.0] * 9 + [128.0]) * 20, None, 384, "3 times 128.0 s, which 19 of 20 stay under"),
        ([2.0] * 4000 + [100.0], None, 200, "2 times the longest, 100.0 s"),
        ([2.0] * 4000 + [50.0], None, 140, "the longest, 50.0 s, seen 90 s late"),
        ([900.0] * 20, None, 3600, "the most for this phase; 5 times the usual"),
    ],
)
def test_a_step_budget_follows_from_the_usual_the_spread_and_the_longest_wait(waits_s, during_s, seconds, why) -> None:
    budget = after("step", *waits_s, during_s=during_s).budget("step", AUTO)
    assert budget.seconds == pytest.approx(seconds, rel=0.1)
    assert budget.why.startswith(why)


def test_a_single_long_wait_fades_and_hardly_moves_what_is_usual() -> None:
    learned = after("step", *[2.0] * 2000, 50.0)
    waits = learned.of("step")
    assert waits is not None
    assert waits.quantile_s(0.5) == pytest.approx(2.0)
    for _ in range(40_000):
        learned = learned.with_wait("step", 2.0, 2.0, 10.0)
    assert 2.0 < learned.of("step").longest_s < 3.0  # four days later


def test_slow_drift_is_followed() -> None:
    learned = after("step", *[10.0] * 1000)
    for wait_s in range(10, 60):
        for _ in range(100):
            learned = learned.with_wait("step", float(wait_s), float(wait_s), float(wait_s))
    assert learned.of("step").quantile_s(0.5) > 40
    assert not learned.is_slow


def test_until_steps_are_known_the_first_ones_speak_for_them() -> None:
    assert after("compile", *[400.0] * 5).budget("step", AUTO).seconds == 1200


def test_a_fixed_phase_does_not_learn_and_first_steps_are_judged_by_it_too() -> None:
    fixed = Budgets(step_s=7, fixed=("step",))
    learned = after("step", *[60.0] * 200)
    assert learned.budget("step", fixed).seconds == 7
    assert learned.budget("step", fixed, warm_up=True).seconds == 7
    assert learned.budget("step", AUTO, warm_up=True).seconds == AUTO.compile_s


def test_what_is_kept_is_bounded_however_many_phases_a_job_names() -> None:
    learned = Learned()
    for number in range(1000):
        learned = learned.with_wait(f"phase{number}", 1.0 + number, 1.0 + number, 600.0)
        learned = learned.with_wait("step", 0.001 * 1.7 ** (number % 40), 5.0, 600.0)
    assert len(learned.waits) <= PHASES_KEPT
    assert len(json.dumps(asdict(learned))) < 8000


# ------------------------------------------------------------------------------------------------------ the watcher


@pytest.fixture
def auto(gang):
    """The gang of four with budgets that learn."""
    config = dataclasses.replace(gang.run.config, budgets=AUTO)
    gang.run = dataclasses.replace(gang.run, config=config)
    return gang


def test_a_watcher_that_was_stopped_has_not_seen_the_silence_of_that_time(auto) -> None:
    auto.pass_time(30, beating=ALL)
    auto.clock.sleep(6000)
    snapshot = auto.look()
    assert {round(snapshot.mono - rank.beat_moved_mono) for rank in snapshot.watch.ranks} == {90}
    assert round(snapshot.mono - snapshot.watch.log_moved_mono) <= 120
    assert judge_hang(snapshot).finding is None


def test_looks_that_are_regularly_far_apart_count_in_full(auto) -> None:
    for _ in range(3):
        auto.clock.sleep(300)
        auto.change(*ALL, beat=auto.beats[0].beat + 1)
        auto.look()
    auto.clock.sleep(300)
    snapshot = auto.look()
    assert snapshot.mono - snapshot.watch.ranks[0].beat_moved_mono == 300


def test_the_time_in_which_a_rank_could_not_be_read_is_not_its_silence(auto) -> None:
    auto.pass_time(30, beating=ALL)
    auto.hidden, auto.problems = frozenset({2}), ("n2.hb: Stale file handle",)
    blind = auto.pass_time(500, beating=ALL - {2})
    assert blind.watch.unseen_since_mono is not None
    auto.hidden, auto.problems = frozenset(), ()
    snapshot = auto.look()
    assert snapshot.watch.unseen_since_mono is None
    assert snapshot.mono - snapshot.watch.ranks[2].beat_moved_mono <= 91


def test_nothing_is_learned_from_a_silence_that_was_judged_a_hang_even_if_it_ends(auto) -> None:
    auto.run = dataclasses.replace(
        auto.run, config=dataclasses.replace(auto.run.config, budgets=Budgets(step_s=10, fixed=("step",)))
    )

    def longest_s() -> float:
        return max(waits.longest_s for waits in auto.watch.learned.waits)

    auto.pass_time(30, beating=ALL)
    before = longest_s()
    auto.pass_time(300)
    auto.pass_time(10, beating=ALL)
    assert longest_s() == before < 3
    auto.pass_time(15)  # past its budget, not yet judged: a near miss is what must be learned
    auto.pass_time(2, beating=ALL)
    assert longest_s() > 14


def test_what_was_learned_outlives_the_attempt_the_watching_host_and_the_database(auto) -> None:
    auto.pass_time(60, beating=ALL)
    learned = auto.watch.learned
    assert learned.of("step").count > 40
    auto.watch = watch_from_text(watch_to_text(auto.watch))
    auto.clock.host = "login2/other"
    auto.look()
    assert auto.watch.learned.waits == learned.waits
    auto.watch = dataclasses.replace(auto.watch, attempt="7.r-1")
    auto.look()
    assert auto.watch.learned.waits == learned.waits
    assert auto.watch.first_step == auto.beats[0].step


def test_the_start_is_learned_where_it_was_watched_and_only_there(auto) -> None:
    auto.look()
    assert auto.watch.learned.of("startup") is None  # it stepped before anybody looked
    auto.watch = None
    auto.change(*ALL, step=-1, phase="startup")
    auto.pass_time(200)
    auto.change(*ALL, step=0, phase="step", beat=6)
    auto.look()
    assert auto.watch.learned.of("startup").longest_s == pytest.approx(200, abs=2)


def test_at_a_look_a_minute_the_mean_of_the_beats_in_between_is_learned(auto) -> None:
    for _ in range(30):
        auto.clock.sleep(60)
        auto.change(*ALL, beat=auto.beats[0].beat + 40, step=auto.beats[0].step + 40, flush=auto.beats[0].flush + 60)
        auto.look()
    steps = auto.watch.learned.of("step")
    assert steps.quantile_s(0.5) == pytest.approx(1.5, rel=0.1)
    assert steps.longest_s < 2


def test_the_node_that_is_behind_is_named_when_a_gang_is_slow(auto) -> None:
    auto.pass_time(40, beating=ALL)
    steps = [dataclasses.replace(after("step", *[0.1] * 36_000).of("step"), watched_s=3600.0)]
    auto.watch = dataclasses.replace(auto.watch, learned=Learned(tuple(steps), 3600.0, recent_s=1.0))
    auto.change(2, 3, step=auto.beats[0].step - 1)
    snapshot = auto.pass_time(700, beating=ALL)
    judgement = judge_hang(snapshot)
    assert judgement.is_slow
    assert judgement.finding is None
    assert judgement.line.startswith("slow, not hung: a step takes 1 s")
    assert judgement.line.endswith("n2 is behind the others")


# ----------------------------------------------------------------------------------------------------------- explain


def test_every_rule_is_explained_with_its_value_budget_and_time_left(gang) -> None:
    gang.pass_time(30, beating=ALL, logging=True)
    explanation = explain_hang(gang.pass_time(4), gang.watch)
    beat, second, longer, slow = explanation.rules
    assert beat.rule == "no beat in step: ranks 0,1,2,3"
    assert (beat.value_s, beat.budget_s, beat.left_s, beat.why, beat.blocked_by) == (4, 10, 6, "run.toml", "")
    assert (second.value_s, second.blocked_by) == (4, "asked once every rank is past its budget")
    assert (longer.left_s, slow.left_s) == (16, None)
    assert explanation.blind_for_s is None
    assert {budget.phase for budget in explanation.budgets} == {*RULES, "default"}


def test_what_blocks_a_rule_is_said(gang) -> None:
    gang.pass_time(5, beating=ALL)
    gang.change(0, phase="checkpoint")
    step, checkpoint = sorted(
        explain_hang(gang.pass_time(40), gang.watch).rules[:2], key=lambda rule: -(rule.value_s or 0)
    )
    assert {step.blocked_by, checkpoint.blocked_by} == {"", "rank 0 in checkpoint has 60 s left"}
    gang.hidden, gang.problems = frozenset({3}), ("n2.hb: Input/output error",)
    blind = explain_hang(gang.pass_time(20), gang.watch)
    assert {rule.blocked_by for rule in blind.rules if rule.left_s is not None} == {
        "could not see rank 3: n2.hb: Input/output error"
    }
    assert blind.blind_for_s == 20


def test_another_watchers_ages_are_not_judged_but_its_budgets_are_shown(gang) -> None:
    gang.pass_time(30, beating=ALL)
    explanation = explain_hang(dataclasses.replace(gang.look(), watch=None), gang.watch, "watched from login2")
    assert (explanation.judgement, explanation.rules) == ("watched from login2", ())
    assert {one.phase: one.waits for one in explanation.budgets}["step"] > 20


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"ranks": 1}', '{"learned": null, "behind": [1]}'])
def test_a_damaged_memory_is_begun_afresh(text: str) -> None:
    assert watch_from_text(text) is None
