"""Lenient acceptance: rejection whose test is easier to pass by a factor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectoolkit.datatypes import DraftLaw, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import is_drafted
from spectoolkit.functional.conditional import GivenOutput, given_match, given_rejection
from spectoolkit.functional.emission import lenient_law
from spectoolkit.functional.renewal import product_of_factors
from spectoolkit.verifiers.draft_law import KNOWN_LAWS, both_probs, residual_at
from spectoolkit.verifiers.prefix import prefix_verdict


@dataclass(frozen=True)
class Lenient:
    """Rejection with q(x) multiplied by the lenience l in the test of a draft, and nowhere else.

        accept x_i         while u_i < p_i(x_i) / (l q_i(x_i))
        recovered token    ~ norm((p_n - q_n)+)      at the first rejected position n
        bonus token        ~ p_n                     if all n drafts were accepted

    A draft x ~ q is accepted with probability sum_x min(p(x) / l, q(x)), and a position emits

        min(p / l, q) + (1 - sum_x min(p / l, q)) norm((p - q)+)  <=  p / l

    so no token becomes more than 1 / l times as probable as it should be. A point mass is accepted while
    l u_i < p_i(x_i) and recovered from p_n without x_n.

    Reference: Leviathan et al., arXiv 2211.17192, appendix A.5. As in `Rejection` we compare u * l * q(x) < p(x).
    Laws: PointMass, Dense, TopM. Lossless only at l = 1, where it is `Rejection`; at temperature 0 it is exact match at
    any l, where the appendix has a lenient rule of its own. `judged_alone` is the test of each position on its own.

    Noise: u_i is `accept[:, i]`; the token at position n is drawn with `emit[:, n]`.

    Raises:
        UsageError: `lenience` (l) outside (0, 1].
    """

    lenience: float = 0.5

    laws = KNOWN_LAWS
    keeps_law = True
    is_exact_when_greedy = True

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise UsageError(f"verifier.lenience: expected a number in (0, 1], got {self.lenience!r}")

    @property
    def is_lossless(self) -> bool:
        return self.lenience == 1

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from the output (`replay`), where it is lossless or greedy."""
        return GivenOutput(given_match if law is PointMass else given_rejection, product_of_factors)

    def emitted_probs(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """The law [..., V] of the token at a position with a draft from q, of rows p and q [..., V]."""
        return lenient_law(target_probs, draft_probs, self.lenience)

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`.

        Raises:
            ContractError: a drafted token that its law gives no probability, or a law this rule cannot judge.
        """
        drafted = is_drafted(proposal.lengths, proposal.tokens.shape[1])
        p, q = both_probs(target_probs, proposal)
        accepted = drafted & (uniforms.accept * self.lenience * q < p)
        return prefix_verdict(accepted, target_probs, proposal, uniforms, residual_at)
