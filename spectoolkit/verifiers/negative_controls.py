"""Rules that are wrong on purpose, each with one fault that was shipped somewhere: what a test of exactness must catch.

Each is `Rejection`, or `Recursive`, but for one part. They are no research options: nothing exports them, and only the
names `verifier=wrong/...` lead to them. The faults of drafting are in `drafters.negative_controls`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectoolkit.datatypes import Chains, Dense, Proposal, TopM, Uniforms, Verdict
from spectoolkit.errors import ContractError
from spectoolkit.functional.acceptance import emitted_block, is_drafted, probs_of, take
from spectoolkit.functional.noise import position_uniforms
from spectoolkit.verifiers.draft_law import KNOWN_LAWS, both_probs, residual_at, rest_without_draft
from spectoolkit.verifiers.prefix import prefix_verdict, ratio_test
from spectoolkit.verifiers.recursive import Recursive
from spectoolkit.verifiers.rejection import Rejection


@dataclass(frozen=True)
class AcceptedByTarget:
    """The accept rule of a point mass with the residual of a sampled draft.

        accept x_i while u_i < p_i(x_i);   recovered token ~ norm((p_n - q_n)+)

    A position emits p(y) q(y) + (1 - sum_x p(x) q(x)) norm((p - q)+). Accept rule and residual belong together: with
    p without x in the place of the residual this is `Threshold`, which is lossless at its defaults.
    Laws: Dense, TopM; of a point mass it would be right.
    """

    laws = (Dense, TopM)
    is_lossless = False
    is_negative_control = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        passed = uniforms.accept < probs_of(target_probs[:, :-1], proposal.tokens)
        accepted = passed & is_drafted(proposal.lengths, proposal.tokens.shape[1])
        return prefix_verdict(accepted, target_probs, proposal, uniforms, residual_at)


@dataclass(frozen=True)
class RecoveredFromTarget:
    """The recovered token is drawn from p_n, not from the residual (p_n - q_n)+.

    A position emits min(p, q)(y) + (1 - sum_x min(p, q)(x)) p(y): too much of what was also drafted.
    Laws: PointMass, Dense, TopM.
    """

    laws = KNOWN_LAWS
    is_lossless = False
    is_negative_control = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        accepted = ratio_test(target_probs, proposal, uniforms)
        return prefix_verdict(accepted, target_probs, proposal, uniforms, lambda row, *_: row)


@dataclass(frozen=True)
class RecoveredWithoutDraft:
    """After the ratio test of a sampled draft, the recovered token is drawn from p_n without x_n alone.

    A position emits min(p, q)(y) + sum over x != y of (q(x) - p(x))+ p(y) / (1 - p(x)). As x is rejected only where
    q(x) > p(x), subtracting q at x alone is the same fault.
    Laws: Dense, TopM; of a point mass it would be right.
    """

    laws = (Dense, TopM)
    is_lossless = False
    is_negative_control = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        accepted = ratio_test(target_probs, proposal, uniforms)
        return prefix_verdict(accepted, target_probs, proposal, uniforms, rest_without_draft)


@dataclass(frozen=True)
class BonusByArgmax(Rejection):
    """The bonus token is argmax p_n, not a sample of p_n; recovered tokens are right.

    Laws: PointMass, Dense, TopM.
    """

    is_lossless = False
    is_negative_control = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        verdict = super().verify(target_probs, proposal, uniforms)
        num_accepted = verdict.num_accepted
        certain = take(target_probs, num_accepted).argmax(-1)
        last = torch.where(num_accepted == proposal.lengths, certain, take(verdict.emitted, num_accepted))
        return replace(verdict, emitted=emitted_block(proposal.tokens, num_accepted, last))


@dataclass(frozen=True)
class WholeBlock:
    """The proposal is accepted as a whole or not at all, by the product of its ratios, which nothing caps on the way.

        accept x_1 .. x_K if u_1 < p_1(x_1) / q_1(x_1) * .. * p_K(x_K) / q_K(x_K), else nothing
        recovered token   ~ norm((p_1 - q_1)+),   bonus token ~ p_{K+1}

    A ratio above 1 makes up for one below, so that drafts of too much probability are kept. `Block` says what a joint
    test needs: the running minimum with 1, and its own residual. With K = 1 it is `Rejection`.
    Laws: PointMass, Dense, TopM. `judged_alone` is the test of the whole at every position.
    """

    laws = KNOWN_LAWS
    is_lossless = False
    is_negative_control = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        drafted = is_drafted(proposal.lengths, proposal.tokens.shape[1])
        p, q = both_probs(target_probs, proposal)
        joint = torch.where(drafted, p, 1).prod(-1, keepdim=True)
        accepted = drafted & (uniforms.accept[:, :1] * torch.where(drafted, q, 1).prod(-1, keepdim=True) < joint)
        return prefix_verdict(accepted, target_probs, proposal, uniforms, residual_at)


@dataclass(frozen=True)
class Reseeded(Rejection):
    """Noise that is seeded again for every token: all positions of a step get the numbers of its first one.

    A draft behind an accepted one is then accepted with the number that was just seen to be small.
    Laws: PointMass, Dense, TopM.
    """

    is_lossless = False
    is_negative_control = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        accept, emit = uniforms.accept, uniforms.emit
        again = replace(uniforms, accept=accept[:, :1].expand_as(accept), emit=emit[:, :1].expand_as(emit))
        return super().verify(target_probs, proposal, again)


@dataclass(frozen=True)
class RecoveredWithDraftNoise(Rejection):
    """The recovered token is drawn with the number that the rejected draft was drawn with.

    Together with `drafters.negative_controls.NoiseByPosition`, which draws with the number of the position; with
    another drafter that number is fresh, and nothing is wrong.
    Laws: PointMass, Dense, TopM.

    Noise: at a position with a draft the token is drawn with the number that `shared` has for it.
    """

    is_lossless = False
    is_negative_control = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`.

        Raises:
            ContractError: no shared noise.
        """
        if uniforms.shared is None:
            raise ContractError("uniforms.shared: expected the keys of the shared noise, got None")
        drafted = is_drafted(proposal.lengths, uniforms.emit.shape[1])
        emit = torch.where(drafted, position_uniforms(uniforms.shared), uniforms.emit)
        return super().verify(target_probs, proposal, replace(uniforms, emit=emit))


@dataclass(frozen=True)
class DistinctAsIndependent(Recursive):
    """Distinct drafts are judged as if they had been drawn with replacement: every candidate against q itself.

    The second candidate follows norm(q without x_1). With chains that were drawn with replacement nothing is wrong.
    Laws: Chains.
    """

    is_lossless = False
    is_negative_control = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`."""
        if isinstance(proposal.law, Chains):
            proposal = replace(proposal, law=replace(proposal.law, with_replacement=True))
        return super().verify(target_probs, proposal, uniforms)
