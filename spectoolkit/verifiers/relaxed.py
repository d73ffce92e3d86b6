"""Relaxed acceptance: accept what is nearly as probable as the target's first choice."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectoolkit.datatypes import Dense, DraftLaw, PointMass, Proposal, SharedNoise, TopM, Uniforms, Verdict
from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import emitted_block, is_drafted, prefix_length, relaxed_test, take
from spectoolkit.functional.conditional import GivenOutput, given_match
from spectoolkit.functional.emission import argmax_law, relaxed_law
from spectoolkit.functional.renewal import product_of_factors


@dataclass(frozen=True)
class Relaxed:
    """Accept each draft that is among the N most probable tokens of p and at most delta below the first of them.

        accept x_i while rank_i(x_i) < N  and  p_i(x_i) >= max p_i - delta
        token behind the accepted prefix, recovered or bonus: argmax p_n

    rank counts from 0 in the order of falling probability; ties go to the lowest id there and in the argmax. A
    probability that misses the threshold by `RELAXED_TOLERANCE` counts as equal to it, and p(x) = 0 never passes. At
    N = 1 the output is greedy decoding, whatever the temperature.

    Reference: relaxed acceptance of TensorRT-LLM for DeepSeek-R1 with multi-token prediction (its settings
    relaxed_topk and relaxed_delta; the defaults here are the values 10 and 0.6 of its examples); no paper. As there,
    every token of the target's own is the argmax, the bonus token too. We deviate in two points: p is the row after the
    request's sampling parameters, where that implementation takes a softmax at temperature 1; and the rule holds for
    the whole output, where there it holds between the two marks of a thinking phase.
    Laws: all (ignored). Not lossless; at temperature 0 it is exact match. `judged_alone` is the test of each position
    on its own.

    Noise: none is used.

    Raises:
        UsageError: `top_n` (N) not an integer >= 1, or `delta` outside [0, 1].
    """

    top_n: int = 10
    delta: float = 0.6

    laws = (PointMass, Dense, TopM, SharedNoise)
    is_lossless = False
    keeps_law = False
    is_exact_when_greedy = True

    def __post_init__(self) -> None:
        if not isinstance(self.top_n, int) or isinstance(self.top_n, bool) or self.top_n < 1:
            raise UsageError(f"verifier.top_n: expected an integer >= 1, got {self.top_n!r}")
        if not 0 <= self.delta <= 1:
            raise UsageError(f"verifier.delta: expected a number in [0, 1], got {self.delta!r}")

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from a greedy output (`replay`); from no other one."""
        return GivenOutput(given_match, product_of_factors)

    def emitted_probs(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """The law [..., V] of the token at a position with a draft from q, of rows p and q [..., V]."""
        return relaxed_law(target_probs, draft_probs, self.top_n, self.delta)

    def bonus_probs(self, target_probs: Tensor) -> Tensor:
        """The law [..., V] of the token behind a whole accepted proposal, of rows p [..., V]."""
        return argmax_law(target_probs)

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        tokens, lengths = proposal.tokens, proposal.lengths
        passed = relaxed_test(target_probs[:, :-1], tokens, self.top_n, self.delta)
        accepted = passed & is_drafted(lengths, tokens.shape[1])
        num_accepted = prefix_length(accepted)
        last = take(target_probs, num_accepted).argmax(-1)
        return Verdict(num_accepted, emitted_block(tokens, num_accepted, last), judged_alone=accepted)
