"""Expected acceptance length and speed-up (Leviathan et al., arXiv 2211.17192, section 3)."""

from __future__ import annotations

import math


def expected_acceptance_length(rate: float, num_draft_tokens: int) -> float:
    """Expected tokens per step, recovered or bonus token included (equation 1).

        (1 - a^(K+1)) / (1 - a) = 1 + a + .. + a^K

    `rate` is a, the chance that a draft token is accepted, independent and equal at all positions. The sum is used: it
    needs no special case at a = 1, where it is K + 1, and loses no digits near it.

    Raises:
        ValueError: `rate` outside [0, 1] or `num_draft_tokens` negative.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate: expected a number in [0, 1], got {rate!r}")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens: expected an integer >= 0, got {num_draft_tokens!r}")
    return math.fsum(rate**i for i in range(num_draft_tokens + 1))


def implied_rate(acceptance_length: float, num_draft_tokens: int) -> float:
    """The rate a at which `expected_acceptance_length` is what was measured: equation 1 solved for a, by bisection.

    NaN where there is nothing to solve: an undefined length, or K = 0.

    Raises:
        ValueError: `acceptance_length` outside [1, K + 1].
    """
    if math.isnan(acceptance_length) or num_draft_tokens == 0:
        return math.nan
    if not 1 <= acceptance_length <= num_draft_tokens + 1:
        raise ValueError(
            f"acceptance_length: expected a number from 1 to K + 1 = {num_draft_tokens + 1}, got {acceptance_length!r}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_acceptance_length(middle, num_draft_tokens) < acceptance_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def expected_speedup(rate: float, num_draft_tokens: int, cost_ratio: float) -> float:
    """Expected speed-up over plain decoding (theorem 3.8): tokens per step over the cost of a step.

        (1 - a^(K+1)) / ((1 - a) (K c + 1))

    `cost_ratio` is c, the time of one draft token over the time of one target pass. A target pass is taken to cost the
    same for one token and for K + 1.

    Raises:
        ValueError: an argument outside its range.
    """
    return speedup(expected_acceptance_length(rate, num_draft_tokens), num_draft_tokens, cost_ratio)


def speedup(acceptance_length: float, num_draft_tokens: int, cost_ratio: float) -> float:
    """Speed-up over plain decoding at a measured acceptance length: theorem 3.8 without a constant acceptance rate.

        AL / (K c + 1)

    Raises:
        ValueError: `num_draft_tokens` negative, or `cost_ratio` not a number >= 0.
    """
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens: expected an integer >= 0, got {num_draft_tokens!r}")
    if not (math.isfinite(cost_ratio) and cost_ratio >= 0):
        raise ValueError(f"cost_ratio: expected a number >= 0, got {cost_ratio!r}")
    return acceptance_length / (num_draft_tokens * cost_ratio + 1)
