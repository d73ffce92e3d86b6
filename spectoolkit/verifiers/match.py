"""Strict match: sample from the target and see whether the draft guessed it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectoolkit.datatypes import Dense, DraftLaw, PointMass, Proposal, SharedNoise, TopM, Uniforms, Verdict
from spectoolkit.functional.acceptance import matched_block
from spectoolkit.functional.conditional import GivenOutput, given_match
from spectoolkit.functional.draw import draw
from spectoolkit.functional.renewal import product_of_factors


@dataclass(frozen=True)
class Match:
    """Draw the target's own token at every position; a draft is accepted if it is that token.

        y_j ~ p_j for j = 0 .. K;   accept x_i while x_i = y_i;   emit y_n at the first mismatch, or as the bonus

    What is emitted is y_0 .. y_n, target samples whatever was drafted. A draft is accepted with probability p(x), which
    is sum_x p(x) q(x) for x ~ q: never more than under rejection, but no draft law has to be kept.

    Reference: the strict sample-and-compare verification of serving systems; no paper claims it. At temperature 0 it is
    the exact match of Stern et al., arXiv 1811.03115, section 3.
    Laws: all (ignored). Lossless. `judged_alone` is x_i = y_i at each position.

    Noise: y_j is drawn with `emit[:, j]`; `accept` is not used.
    """

    laws = (PointMass, Dense, TopM, SharedNoise)
    is_lossless = True
    keeps_law = False

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        return Verdict(*matched_block(draw(target_probs, uniforms.emit), proposal.tokens, proposal.lengths))

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from the output (`replay`)."""
        return GivenOutput(given_match, product_of_factors)
