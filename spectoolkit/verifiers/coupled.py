"""Coupled verification: drafter and target draw with the same noise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectoolkit.datatypes import Dense, DraftLaw, PointMass, Proposal, SharedNoise, TopM, Uniforms, Verdict
from spectoolkit.errors import ContractError
from spectoolkit.functional.acceptance import matched_block
from spectoolkit.functional.conditional import GivenOutput, given_coupled, given_match
from spectoolkit.functional.draw import gumbel_max
from spectoolkit.functional.renewal import product_of_factors


@dataclass(frozen=True)
class Coupled:
    """Draw the target's own token at every position with the position's shared noise G; accept a draft that equals it.

        y_j = argmax(log p_j + G_j) for j = 0 .. K;   accept x_i while x_i = y_i
        emit y_n at the first mismatch, or as the bonus

    What is emitted is y_0 .. y_n, and G depends on seed, request and position only: the output of a request is the same
    for every drafter, draft temperature and K. A draft of the law SharedNoise, x_i = argmax(log q_i + G_i), is accepted
    with probability sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x)) >= (1 - TV) / (1 + TV), a draft of another law with
    probability p(x), as by `Match`.

    Reference: Daliri et al., arXiv 2408.07978, "Coupling without communication and drafter-invariant speculative
    decoding".
    Laws: all (ignored). Lossless. `judged_alone` is x_i = y_i at each position.

    Noise: y_j is drawn with `shared[:, j]`; `accept` and `emit` are not used.
    """

    laws = (PointMass, Dense, TopM, SharedNoise)
    is_lossless = True
    keeps_law = False

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`.

        Raises:
            ContractError: no shared noise.
        """
        if uniforms.shared is None:
            raise ContractError("uniforms.shared: expected the keys of the shared noise, got None")
        sampled = gumbel_max(target_probs, uniforms.shared)
        return Verdict(*matched_block(sampled, proposal.tokens, proposal.lengths))

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from the output (`replay`)."""
        return GivenOutput(given_coupled if law is SharedNoise else given_match, product_of_factors)
