"""How often to save: the model against published figures and against a simulation; what a run's own record says."""

import math
import random

import pytest

from krea_runner.decide.interval import Costs, best_interval_s, ettr, failure_rate_bounds, young_interval_s
from krea_runner.model import Attempt, AttemptKey, Decision, DecisionKind, Finding, Incident, Symptom
from krea_runner.report.advice import Value, advise, measured_mtbf, measured_restart

# Failures in 1000 node-days: Meta's RSC-1 and RSC-2 (arXiv 2410.21680), Llama 3 (arXiv 2407.21783); nodes of 8 GPUs. ETTR with
# restart, interval and stall in minutes 10/60/0.5, 10/5/0.5 and 2/5/0.5, and the best interval for the first, in minutes.
FLEETS = [
    (6.50, 1024, (0.969, 0.902, 0.907), 41.3), (6.50, 4096, (0.903, 0.883, 0.899), 20.5),
    (6.50, 16384, (0.675, 0.808, 0.870), 10.1), (6.50, 32768, (0.448, 0.718, 0.832), 7.0),
    (6.50, 100_000, (0.066, 0.441, 0.693), 3.9), (2.34, 16384, (0.866, 0.871, 0.895), 17.0),
    (2.34, 100_000, (0.411, 0.701, 0.825), 6.7), (3.79, 16384, (0.795, 0.849, 0.886), 13.3),
    (3.79, 100_000, (0.225, 0.597, 0.777), 5.2),
]  # fmt: skip
SETTINGS = ((10, 60, 0.5), (10, 5, 0.5), (2, 5, 0.5))


def mtbf_s(rate: float, gpus: int) -> float:
    return 1000 * 86400 / (rate * gpus / 8)


@pytest.mark.parametrize(("rate", "gpus", "ettrs", "best_min"), FLEETS)
def test_the_published_fleets_come_out_as_calculated_elsewhere(rate, gpus, ettrs, best_min) -> None:
    for (restart, interval, stall), wanted in zip(SETTINGS, ettrs, strict=True):
        assert ettr(Costs(mtbf_s(rate, gpus), restart * 60, stall * 60), interval * 60) == pytest.approx(
            wanted, abs=0.003
        )
    assert best_interval_s(Costs(mtbf_s(rate, gpus), 600, 30)) / 60 == pytest.approx(best_min, abs=0.15)


def simulated(costs: Costs, interval_s: float, *, failures: int, seed: int) -> float:
    """Failures at random; nothing of the model is used. What was trained since the last save that is whole is lost."""
    draw = random.Random(seed)
    useful = wall = 0.0
    for _ in range(failures):
        until = draw.expovariate(1 / costs.mtbf_s)
        wall += until
        pieces = max(0, math.floor((until - costs.restart_s) / (interval_s + costs.stall_s)))
        useful += pieces * interval_s
    return useful / wall


@pytest.mark.parametrize(("rate", "gpus", "ettrs", "best_min"), FLEETS)
def test_a_simulation_agrees_within_one_per_cent(rate, gpus, ettrs, best_min) -> None:
    for restart, interval, stall in SETTINGS:
        costs = Costs(mtbf_s(rate, gpus), restart * 60, stall * 60)
        found = simulated(costs, interval * 60, failures=40_000, seed=gpus)
        assert ettr(costs, interval * 60) == pytest.approx(found, abs=0.01)


def test_no_other_interval_is_better_than_the_best() -> None:
    costs = Costs(6.48 * 3600, 600, 30)
    best = best_interval_s(costs)
    assert all(ettr(costs, best) >= ettr(costs, best * factor) for factor in (0.1, 0.5, 0.9, 1.1, 2, 10))
    assert best == pytest.approx(young_interval_s(costs), rel=0.05)


def test_a_run_that_cannot_get_on_has_no_effective_time_and_no_overflow() -> None:
    assert ettr(Costs(60, 1e9, 30), 600) == 0.0
    assert ettr(Costs(60, 600, 30), 1e9) == 0.0


def test_the_uncertainty_is_that_of_llama_3() -> None:
    """419 failures in 54 days: one in 3.09 h, 2.81 to 3.41 h."""
    low, high = failure_rate_bounds(419)
    assert [54 * 24 / count for count in (high, 419, low)] == pytest.approx([2.81, 3.093, 3.412], abs=0.002)


@pytest.mark.parametrize(("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (5, 1.623, 11.668)])
def test_few_failures_have_wide_bounds(count, low, high) -> None:
    """The exact bounds of any table (Garwood 1936)."""
    assert failure_rate_bounds(count) == pytest.approx((low, high), abs=0.001)


# --------------------------------------------------------------------------------------------------- of a run's record


def incident(
    number: int, *, symptom: Symptom = Symptom.CRASH, at: float = 1000.0, resumed_at: float | None = None
) -> Incident:
    finding = Finding(symptom, "exit_code", "x", last_progress_at=at - 20.0)
    decision = Decision(DecisionKind.REQUEUE, "")
    return Incident(number, 1, "llm", AttemptKey("7", number), finding, at, 10, decision, resumed_at=resumed_at)


def test_failures_are_counted_over_the_time_that_ran() -> None:
    attempts = [
        Attempt(1, 1, AttemptKey("7"), 0.0, started_at=100.0, ended_at=1100.0),
        Attempt(2, 1, AttemptKey("7", 1), 0.0, started_at=5000.0),
        Attempt(3, 1, AttemptKey("7", 2), 0.0),
    ]
    incidents = [incident(0), incident(1, symptom=Symptom.TIME_LIMIT), incident(2, symptom=Symptom.HANG)]
    assert measured_mtbf(attempts, incidents, now=6000.0) == (2, 2000.0)


def test_a_restart_takes_from_the_last_sign_to_the_first_step() -> None:
    measured = measured_restart([incident(0, resumed_at=1100.0), incident(1, resumed_at=1300.0), incident(2)])
    assert measured is not None
    assert measured.seconds == pytest.approx(220.0)
    assert measured_restart([incident(2)]) is None


def test_the_advice_gains_what_the_model_says() -> None:
    advice = advise(
        failures=(10, 10 * 3.09 * 3600), nodes=2048, gpus=16384, restart=Value(600, "given"), stall=Value(30, "given"),
        interval=Value(3600, "given"),
    )  # fmt: skip
    assert advice.now is not None
    assert advice.now.ettr == pytest.approx(0.795, abs=0.003)
    assert advice.best.interval_s / 60 == pytest.approx(13.3, abs=0.2)
    assert advice.best.gained_gpu_s == pytest.approx((advice.best.ettr - advice.now.ettr) * 30 * 86400 * 16384)
    assert advice.mtbf_bounds_s is not None
    assert advice.mtbf_bounds_s[0] < 3.09 * 3600 < advice.mtbf_bounds_s[1]
    assert all(one.ettr > advice.best.ettr for one in advice.choices)


def test_a_run_without_failures_is_told_what_was_assumed() -> None:
    advice = advise(failures=(0, 3600.0), nodes=128, gpus=1024)
    assert advice.mtbf.source.startswith("assumed")
    assert advice.mtbf.seconds / 3600 == pytest.approx(49.5, abs=0.1)
    assert (advice.now, advice.mtbf_bounds_s) == (None, None)
