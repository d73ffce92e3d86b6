"""Rejection sampling: speculative sampling as it was introduced."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectoolkit.datatypes import DraftLaw, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.functional.conditional import GivenOutput, given_match, given_rejection
from spectoolkit.functional.renewal import product_of_factors
from spectoolkit.verifiers.draft_law import KNOWN_LAWS, residual_at
from spectoolkit.verifiers.prefix import prefix_verdict, ratio_test


@dataclass(frozen=True)
class Rejection:
    """Accept each draft with the probability that makes the output follow the target, recover from what is missing.

        accept x_i         while u_i < p_i(x_i) / q_i(x_i)
        recovered token    ~ norm((p_n - q_n)+)      at the first rejected position n
        bonus token        ~ p_n                     if all n drafts were accepted

    A point mass is the law q = one-hot of x: accepted while u_i < p_i(x_i), recovered from p_n without x_n. With
    one-hot target rows (temperature 0) this is exact match.

    Reference: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2. We compare
    u * q(x) < p(x) in float64, which is the same test without a division: u = 0 does not accept p(x) = 0.
    Laws: PointMass, Dense, TopM. Lossless. `judged_alone` is the test of each position on its own.

    Noise: u_i is `accept[:, i]`; the token at position n is drawn with `emit[:, n]`.
    """

    laws = KNOWN_LAWS
    is_lossless = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`.

        Raises:
            ContractError: a drafted token that its law gives no probability, or a law this rule cannot judge.
        """
        accepted = ratio_test(target_probs, proposal, uniforms)
        return prefix_verdict(accepted, target_probs, proposal, uniforms, residual_at)

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from the output (`replay`)."""
        if law is PointMass:
            return GivenOutput(given_match, product_of_factors)
        return GivenOutput(given_rejection, product_of_factors)
