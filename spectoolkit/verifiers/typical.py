"""Typical acceptance: accept what the target finds plausible enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from spectoolkit.datatypes import PAD, Dense, DraftLaw, PointMass, Proposal, SharedNoise, TopM, Uniforms, Verdict
from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import (
    TYPICAL_TOLERANCE,
    emitted_block,
    is_drafted,
    prefix_length,
    probs_of,
    take,
    typical_threshold,
)
from spectoolkit.functional.conditional import GivenOutput, given_match
from spectoolkit.functional.draw import draw
from spectoolkit.functional.emission import argmax_law, typical_law
from spectoolkit.functional.renewal import product_of_factors

Recovery = Literal["sample", "argmax", "first_only", "medusa"]


@dataclass(frozen=True)
class Typical:
    """Accept each draft whose target probability exceeds a threshold that falls with the target's entropy H (in nats).

        accept x_i while p_i(x_i) > min(epsilon, delta * exp(-H(p_i)))

    The comparison is strict: a probability equal to the threshold, within `TYPICAL_TOLERANCE`, is rejected.
    At the first rejected position n the output goes on with, by `recovery`,

        "sample"      a sample of p_n
        "argmax"      the most probable token of p_n (lowest id on ties)
        "first_only"  a sample of p_n if n = 0, else nothing: older serving code, kept to measure what it costs
        "medusa"      the most probable token of p_n, and so it does behind a whole accepted proposal

    and, but for "medusa", with a sample of p_n, the bonus token, if all n drafts were accepted (n = 0 included).

    Reference: Cai et al. (Medusa), arXiv 2401.10774, section 2.3.1, typical acceptance. There the first token of a step
    is decoded greedily and accepted unconditionally. That token is no draft: it is the argmax of the target's row
    behind the tokens accepted one step earlier. Here a step emits the token of that row itself, as its last one, and
    the drafter continues from it. So "medusa" is Medusa's rule on a chain: each step ends with the argmax, untested,
    whether a draft was rejected or none, and all drafts behind it are tested, the first one too. Only the first token
    of an output differs: no step goes before it, so it is drafted and tested. The other values of `recovery` deviate as
    serving systems do: the bonus token is the target's ordinary sample also when recovered tokens are the argmax.
    Laws: all (ignored). Not lossless. `judged_alone` is the test of each position on its own.

    Noise: the token at position n is drawn with `emit[:, n]`; `accept` is not used.

    Raises:
        UsageError: `epsilon` outside (0, 1], `delta` not positive and finite, or an unknown `recovery`.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    recovery: Recovery = "sample"

    laws = (PointMass, Dense, TopM, SharedNoise)
    is_lossless = False
    keeps_law = False

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise UsageError(f"verifier.epsilon: expected a number in (0, 1], got {self.epsilon!r}")
        if not 0 < self.delta < math.inf:
            raise UsageError(f"verifier.delta: expected a finite number > 0, got {self.delta!r}")
        if self.recovery not in get_args(Recovery):
            raise UsageError(f"verifier.recovery: expected one of {get_args(Recovery)}, got {self.recovery!r}")

    @property
    def is_exact_when_greedy(self) -> bool:
        """Whether this is exact match at temperature 0: a one-hot row has H = 0, and only its own token may exceed."""
        return self.recovery != "first_only" and min(self.epsilon, self.delta) * (1 + TYPICAL_TOLERANCE) < 1

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from a greedy output (`replay`); from no other one."""
        return GivenOutput(given_match, product_of_factors)

    def emitted_probs(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """The law [..., V] of the token at a position with a draft from q, of rows p and q [..., V]."""
        return typical_law(target_probs, draft_probs, self.epsilon, self.delta, self.recovery in ("argmax", "medusa"))

    def bonus_probs(self, target_probs: Tensor) -> Tensor:
        """The law [..., V] of the token behind a whole accepted proposal, of rows p [..., V]."""
        return argmax_law(target_probs) if self.recovery == "medusa" else target_probs

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        tokens, lengths = proposal.tokens, proposal.lengths
        rows = target_probs[:, :-1]
        threshold = typical_threshold(rows, self.epsilon, self.delta)
        is_typical = probs_of(rows, tokens) > threshold * (1 + TYPICAL_TOLERANCE)
        accepted = is_typical & is_drafted(lengths, tokens.shape[1])
        num_accepted = prefix_length(accepted)

        row = take(target_probs, num_accepted)
        last = draw(row, take(uniforms.emit, num_accepted))
        is_recovered = num_accepted < lengths
        if self.recovery == "medusa":
            last = row.argmax(-1)
        elif self.recovery == "argmax":
            last = torch.where(is_recovered, row.argmax(-1), last)
        elif self.recovery == "first_only":
            last = torch.where(is_recovered & (num_accepted > 0), PAD, last)
        return Verdict(num_accepted, emitted_block(tokens, num_accepted, last), judged_alone=accepted)
