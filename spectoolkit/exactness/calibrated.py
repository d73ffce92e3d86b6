"""Test of sampled outputs against the target's law: false alarms and power are bounded for every sample size.

n independent outputs fall into m cells, whose probabilities pi are known. With the empirical frequencies f,

    TV(f, pi) = sum_i |f_i - pi_i| / 2

changes by at most 1/n when one output changes. So by McDiarmid's inequality (Surveys in Combinatorics, 1989, lemma
1.2), whatever law q the outputs have,

    P(TV >= E TV + t) <= exp(-2 n t^2),   P(TV <= E TV - t) <= exp(-2 n t^2)

*Under the target's law* E TV is known exactly: |X - n pi| has a mean in closed form for a binomial X (De Moivre;
Diaconis and Zabell, Statistical Science 6, 1991). That gives a p-value. *Under any other law* E TV >= TV(q, pi), since
TV is convex and E f = q. That gives the power, against all alternatives at once. The second part of the test looks at
single cells (Chernoff bounds, summed over cells), so that one token that the target never says is seen at once.

Nothing here is an asymptotic or a simulated bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.exactness.target_law import Continuations


@dataclass(frozen=True)
class SampleTest:
    """What the test found.

    Attributes:
        num_samples: n.
        distance: TV(f, pi) of the cells.
        expected_distance: its expectation under the target's law.
        p_value: P(p_value <= a) <= a for every a under the target's law.
    """

    num_samples: int
    distance: float
    expected_distance: float
    p_value: float


def cells(outputs: Mapping[tuple[int, ...], int], law: Continuations) -> tuple[Tensor, Tensor]:
    """Counts and probabilities [m] of the law's continuations, the last cell holding all others.

    `outputs` says how often each output occurred.
    """
    known = [outputs.get(output, 0) for output in law.outputs]
    rest = sum(outputs.values()) - sum(known)
    counts = torch.tensor([*known, rest], dtype=torch.float64)
    return counts, torch.cat([law.probs, (1 - law.probs.sum()).clamp(min=0)[None]])


def sample_test(counts: Tensor, probs: Tensor) -> SampleTest:
    """Test `counts` [m] of independent outputs against `probs` [m].

        p = min(1, 2 min(exp(-2 n (TV - E TV)+^2),  2 m min_i exp(-n KL(f_i, pi_i))))

    Rounding of the probabilities, relatively 1e-9 and absolutely 1e-12, is not held against the outputs.
    """
    num = float(counts.sum())
    found = float((counts / num - probs).abs().sum()) / 2
    expected = expected_distance(probs, round(num))
    whole = math.exp(-2 * num * max(0.0, found - expected) ** 2)
    single = 2 * len(probs) * math.exp(-num * float(_divergence(counts / num, probs).max()))
    return SampleTest(round(num), found, expected, min(1.0, 2 * min(whole, single)))


def smallest_detectable(probs: Tensor, num_samples: int, level: float, power: float) -> float:
    """The total variation that is detected at `level` with probability `power`, whatever the law of the outputs.

        d = E TV + sqrt(log(2 / level) / 2n) + sqrt(log(1 / (1 - power)) / 2n)

    Above 1 where so few outputs detect nothing.
    """
    threshold = math.sqrt(math.log(2 / level) / (2 * num_samples))
    spread = math.sqrt(math.log(1 / (1 - power)) / (2 * num_samples))
    return expected_distance(probs, num_samples) + threshold + spread


def expected_distance(probs: Tensor, num_samples: int) -> float:
    """E TV(f, pi) of n outputs that follow pi.

    E|X - n pi| = 2 k C(n, k) pi^k (1 - pi)^(n - k + 1),  k = floor(n pi) + 1,  for X binomial
    """
    inside = probs[(probs > 0) & (probs < 1)].to(torch.float64)
    n = torch.tensor(float(num_samples), dtype=torch.float64)
    k = (n * inside).floor() + 1
    log_choose = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    log_mean = math.log(2) + k.log() + log_choose + k * inside.log() + (n - k + 1) * torch.log1p(-inside)
    return float(log_mean.exp().sum()) / (2 * num_samples)


def combined(tests: Sequence[SampleTest]) -> float:
    """One p-value of several tests, by Bonferroni: valid however they depend on each other."""
    return min(1.0, len(tests) * min(test.p_value for test in tests))


def _divergence(observed: Tensor, probs: Tensor) -> Tensor:
    """KL divergence [m] of coins: f log(f / pi) + (1 - f) log((1 - f) / (1 - pi)); 0 within the rounding of pi."""
    slack = 1e-9 * probs + 1e-12
    low, high = (probs - slack).clamp(min=0), (probs + slack).clamp(max=1)
    nearest = observed.clamp(min=low, max=high)
    one = torch.special.xlogy(observed, observed) - torch.special.xlogy(observed, nearest)
    other = torch.special.xlogy(1 - observed, 1 - observed) - torch.special.xlogy(1 - observed, 1 - nearest)
    return (one + other).clamp(min=0)
