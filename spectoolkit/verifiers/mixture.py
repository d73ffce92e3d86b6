"""Verification against a mixture of the target's law and the draft's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectoolkit.datatypes import DraftLaw, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import is_drafted
from spectoolkit.functional.conditional import GivenOutput, given_match, given_rejection
from spectoolkit.functional.emission import mixture_law
from spectoolkit.functional.renewal import product_of_factors
from spectoolkit.verifiers.draft_law import KNOWN_LAWS, both_probs, residual_at
from spectoolkit.verifiers.prefix import prefix_verdict


@dataclass(frozen=True)
class Mixture:
    """Rejection against p_w = (1 - w) p + w q in the place of p: a lossy rule whose output has a law that can be said.

        accept x_i         while u_i < p_w,i(x_i) / q_i(x_i)
        recovered token    ~ norm((p_w,n - q_n)+) = norm((p_n - q_n)+)   at the first rejected position n, for w < 1
        bonus token        ~ p_n                                         if all n drafts were accepted

    Every position that a step reaches and that has a draft emits p_w exactly, given the tokens before it, and a draft
    is accepted with probability 1 - (1 - w) TV(p, q). The bonus token follows p, as no draft row is known there; so
    does the token of a step without any draft. A point mass is q = the one-hot row of x: accepted while
    u_i < (1 - w) p_i(x_i) + w. As p_w has the tokens of q, a token that the target's filters exclude may be emitted;
    one that the target's vocabulary lacks is not.

    Reference: Leviathan et al., arXiv 2211.17192, algorithm 1, with p_w for p; Narasimhan et al., arXiv 2405.19261, put
    other laws made of p and q in that place.
    Laws: PointMass, Dense, TopM. Lossless only at w = 0, where it is `Rejection`, and not at temperature 0 either.
    `judged_alone` is the test of each position on its own.

    Noise: u_i is `accept[:, i]`; the token at position n is drawn with `emit[:, n]`.

    Raises:
        UsageError: `draft_weight` (w) outside [0, 1].
    """

    draft_weight: float = 0.1

    laws = KNOWN_LAWS
    keeps_law = True

    def __post_init__(self) -> None:
        if not 0 <= self.draft_weight <= 1:
            raise UsageError(f"verifier.draft_weight: expected a number in [0, 1], got {self.draft_weight!r}")

    @property
    def is_lossless(self) -> bool:
        return self.draft_weight == 0

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from the output (`replay`), where it is lossless."""
        return GivenOutput(given_match if law is PointMass else given_rejection, product_of_factors)

    def emitted_probs(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """The law [..., V] of the token at a position with a draft from q, of rows p and q [..., V]."""
        return mixture_law(target_probs, draft_probs, self.draft_weight)

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`.

        Raises:
            ContractError: a drafted token that its law gives no probability, or a law this rule cannot judge.
        """
        tokens, w = proposal.tokens, self.draft_weight
        drafted = is_drafted(proposal.lengths, tokens.shape[1])
        p, q = both_probs(target_probs, proposal)
        accepted = drafted & (uniforms.accept * q < (1 - w) * p + w * q) & (tokens < target_probs.shape[-1])
        # p_w - q = (1 - w) (p - q): the residual has the weights of rejection's.
        return prefix_verdict(accepted, target_probs, proposal, uniforms, residual_at)
