import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.report.rates import Rate, count_interval, reaches

# 54 days on 2,048 nodes, 466 interruptions of which 47 planned (arXiv 2407.21783, table 5).
LLAMA = Rate(419, 54 * 24.0, 2048 * 54 * 24.0)


def test_llama_3s_interruptions_give_its_mtbf() -> None:
    assert LLAMA.mtbf_h == pytest.approx(3.093, abs=5e-4)
    assert LLAMA.mtbf_interval_h == pytest.approx((2.81, 3.41), abs=5e-3)
    assert LLAMA.per_1000_node_days == pytest.approx(3.789, abs=5e-4)
    low, high = LLAMA.per_1000_node_days_interval
    assert low < LLAMA.per_1000_node_days < high
    assert Rate(466, LLAMA.hours, LLAMA.node_hours).mtbf_h == pytest.approx(2.781, abs=5e-4)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.390), (100, 81.36, 121.63)]
)
def test_the_interval_of_a_count_is_garwoods(count: int, low: float, high: float) -> None:
    assert count_interval(count) == pytest.approx((low, high), abs=6e-3)


@given(st.integers(1, 400), st.floats(0.01, 800))
def test_a_count_is_reached_as_often_as_the_sum_of_the_probabilities_says(count: int, mean: float) -> None:
    below = math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count))
    assert reaches(count, mean) == pytest.approx(1.0 - below, abs=1e-9)


def test_nothing_counted_leaves_the_mtbf_open_upwards() -> None:
    quiet = Rate(0, 100.0, 400.0)
    assert quiet.mtbf_h == math.inf
    assert quiet.mtbf_interval_h == (pytest.approx(100 / 3.689, abs=0.01), math.inf)
    assert quiet.per_1000_node_days == 0.0


def test_the_interval_of_a_million_is_found() -> None:
    low, high = count_interval(1_000_000)
    assert (low, high) == (pytest.approx(998_041, abs=5), pytest.approx(1_001_961, abs=5))
