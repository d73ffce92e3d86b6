import math

import pytest

from spectoolkit.functional.theory import expected_acceptance_length, expected_speedup, implied_rate


@pytest.mark.parametrize(
    ("rate", "num_draft_tokens", "expected"),
    [(0.8, 3, 2.952), (2 / 3, 2, 1 + 10 / 9), (0.5, 0, 1.0), (0.0, 5, 1.0), (1.0, 4, 5.0), (0.8, 5, 3.68928)],
)
def test_expected_acceptance_length(rate: float, num_draft_tokens: int, expected: float) -> None:
    assert expected_acceptance_length(rate, num_draft_tokens) == pytest.approx(expected, rel=1e-14)


def test_it_equals_the_quotient_of_the_paper_and_is_continuous_at_one() -> None:
    assert expected_acceptance_length(0.7, 6) == pytest.approx((1 - 0.7**7) / 0.3, rel=1e-14)
    assert expected_acceptance_length(1 - 1e-13, 4) == pytest.approx(5 - 10e-13, rel=1e-15)


def test_expected_speedup() -> None:
    assert expected_speedup(0.8, 5, 0.05) == pytest.approx(3.68928 / 1.25)
    assert expected_speedup(0.8, 5, 0.0) == pytest.approx(3.68928)
    assert expected_speedup(0.0, 4, 0.25) == 0.5


@pytest.mark.parametrize(("rate", "num_draft_tokens"), [(-0.1, 3), (1.1, 3), (float("nan"), 3), (0.5, -1)])
def test_arguments_out_of_range_are_named(rate: float, num_draft_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"rate|num_draft_tokens"):
        expected_acceptance_length(rate, num_draft_tokens)


@pytest.mark.parametrize("cost_ratio", [-1.0, float("inf"), float("nan")])
def test_cost_ratio_out_of_range(cost_ratio: float) -> None:
    with pytest.raises(ValueError, match="cost_ratio"):
        expected_speedup(0.5, 3, cost_ratio)


@pytest.mark.parametrize(("rate", "num_draft_tokens"), [(0.0, 4), (0.37, 1), (0.62, 5), (1.0, 3)])
def test_the_implied_rate_is_the_one_that_gives_the_length(rate: float, num_draft_tokens: int) -> None:
    length = expected_acceptance_length(rate, num_draft_tokens)
    assert implied_rate(length, num_draft_tokens) == pytest.approx(rate, abs=1e-12)


def test_no_rate_where_there_is_nothing_to_solve() -> None:
    assert math.isnan(implied_rate(float("nan"), 4))
    assert math.isnan(implied_rate(1.0, 0))
    with pytest.raises(ValueError, match=r"from 1 to K \+ 1 = 5, got 5.1"):
        implied_rate(5.1, 4)
