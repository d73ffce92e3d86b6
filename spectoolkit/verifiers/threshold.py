"""Threshold acceptance: the rule for point masses, with two settings that accept more."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spectoolkit.datatypes import Dense, DraftLaw, PointMass, Proposal, SharedNoise, TopM, Uniforms, Verdict
from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import is_drafted, probs_of
from spectoolkit.functional.conditional import GivenOutput, given_match
from spectoolkit.functional.emission import threshold_law
from spectoolkit.functional.renewal import product_of_factors
from spectoolkit.verifiers.draft_law import rest_without_draft
from spectoolkit.verifiers.prefix import prefix_verdict


@dataclass(frozen=True)
class Threshold:
    """Judge every draft as a point mass, whatever it was drawn from, and accept more than that allows.

        accept x_i         while u_i < p_i(x_i) / threshold_acc  or  p_i(x_i) >= threshold_single
        recovered token    ~ norm(p_n without x_n)   at the first rejected position n
        bonus token        ~ p_n                     if all n drafts were accepted

    With a(x) = 1 where p(x) >= threshold_single, else min(1, p(x) / threshold_acc), a draft x ~ q is accepted with
    probability sum_x q(x) a(x), and a position emits

        q(y) a(y) + sum over x != y of q(x) (1 - a(x)) p(y) / (1 - p(x))

    which is p(y) for every q where both thresholds are 1: a sampled draft judged by the rule of point masses is
    accepted less often than by rejection, but without bias. It is then `Match` in law.

    Reference: the target-only tree sampling of SGLang (its settings speculative_accept_threshold_single and
    speculative_accept_threshold_acc, 1 by default) on a chain of drafts; no paper. We compare u * threshold_acc < p(x),
    where it compares with <=, as u may be 0: p(x) = 0 is never accepted.
    Laws: all (ignored). Lossless only where both thresholds are 1; at temperature 0 it is exact match at any.
    `judged_alone` is the test of each position on its own.

    Noise: u_i is `accept[:, i]`; the token at position n is drawn with `emit[:, n]`.

    Raises:
        UsageError: a threshold outside (0, 1].
    """

    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    laws = (PointMass, Dense, TopM, SharedNoise)
    keeps_law = False
    is_exact_when_greedy = True

    def __post_init__(self) -> None:
        for name in ("threshold_single", "threshold_acc"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise UsageError(f"verifier.{name}: expected a number in (0, 1], got {value!r}")

    @property
    def is_lossless(self) -> bool:
        return self.threshold_single == self.threshold_acc == 1

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from the output (`replay`), where it is lossless or greedy."""
        return GivenOutput(given_match, product_of_factors)

    def emitted_probs(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """The law [..., V] of the token at a position with a draft from q, of rows p and q [..., V]."""
        return threshold_law(target_probs, draft_probs, self.threshold_single, self.threshold_acc)

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        p = probs_of(target_probs[:, :-1], proposal.tokens)
        passed = (uniforms.accept * self.threshold_acc < p) | (p >= self.threshold_single)
        accepted = passed & is_drafted(proposal.lengths, proposal.tokens.shape[1])
        return prefix_verdict(accepted, target_probs, proposal, uniforms, rest_without_draft)
