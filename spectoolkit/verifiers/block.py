"""Block verification: the drafts of a step are judged jointly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from spectoolkit.datatypes import DraftLaw, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.functional.acceptance import emitted_block, is_drafted, take
from spectoolkit.functional.conditional import GivenOutput, given_match, ratio
from spectoolkit.functional.draw import draw
from spectoolkit.functional.renewal import product_of_factors, running_minimum
from spectoolkit.verifiers.draft_law import KNOWN_LAWS, both_probs, residual_at, residual_masses


@dataclass(frozen=True)
class Block:
    """Accept the longest prefix that passes a test of the whole prefix; a failed shorter prefix does not matter.

        pi_0 = 1,  pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i))
        S_i = sum_x (pi_i p_{i+1}(x) - q_{i+1}(x))+
        h_i = S_i / (S_i + 1 - pi_i) for i < K, 1 where pi_i = 1;   h_K = pi_K
        accept x_1 .. x_n, n the largest i with u_i < h_i, or 0
        recovered token    ~ norm((pi_n p_{n+1} - q_{n+1})+)     if n < K
        bonus token        ~ p_{K+1}                             if n = K

    K is the row's own proposal length. It accepts at least as much as rejection in expectation, and with K = 1 or a
    point mass as much: there it is another way to draw the same counts.

    Reference: Sun et al., arXiv 2403.10444, algorithm 2. We test u < h, as u may be 0: a prefix with a token of target
    probability 0 has h = 0 and is never accepted.
    Laws: PointMass, Dense, TopM. Lossless. `judged_alone` is the test u_i q_i(x_i) < p_i(x_i) of rejection, since the
    tests of this rule are of prefixes: it may be False for a token of the accepted prefix and True for the first
    rejected one.

    Noise: u_i is `accept[:, i - 1]`, independent for every i; the token behind n accepted ones is drawn with
    `emit[:, n]`.
    """

    laws = KNOWN_LAWS
    is_lossless = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`.

        Raises:
            ContractError: a drafted token that its law gives no probability, or a law this rule cannot judge.
        """
        tokens, lengths = proposal.tokens, proposal.lengths
        drafted = is_drafted(lengths, tokens.shape[1])
        p, q = both_probs(target_probs, proposal)

        joint = self._joint_ratio(p, torch.where(drafted, q, 1))
        missing = residual_masses(target_probs[:, :-1], proposal, joint[:, :-1])
        # A prefix of i tokens that ends the proposal has no next draft row; past the end nothing is read.
        pi, mass = joint[:, 1:], pad(missing, (0, 1))[:, 1:]
        size = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        threshold = torch.where(pi < 1, mass / (mass + 1 - pi), 1)
        threshold = torch.where(size == lengths[:, None], pi, threshold)
        passed = drafted & (uniforms.accept < threshold)
        num_accepted = pad(torch.where(passed, size, 0), (1, 0)).amax(-1)

        target_row = take(target_probs, num_accepted)
        is_bonus = (num_accepted == lengths)[:, None]
        scaled = target_row * take(joint, num_accepted)[:, None].to(target_row.dtype)
        weights = torch.where(is_bonus, target_row, residual_at(scaled, proposal, num_accepted))
        last = draw(weights, take(uniforms.emit, num_accepted))
        judged_alone = drafted & (uniforms.accept * q < p)
        return Verdict(num_accepted, emitted_block(tokens, num_accepted, last), judged_alone)

    def given_output(self, law: type[DraftLaw]) -> GivenOutput:
        """How acceptance of drafts of `law` follows from the output (`replay`)."""
        if law is PointMass:
            return GivenOutput(given_match, product_of_factors)
        return GivenOutput(ratio, running_minimum)

    @staticmethod
    def _joint_ratio(p: Tensor, q: Tensor) -> Tensor:
        """pi_0 .. pi_K [B, K+1] of p_i(x_i) and q_i(x_i) [B, K]."""
        joint = [p.new_ones(len(p))]
        for i in range(p.shape[1]):
            joint.append((joint[-1] * p[:, i] / q[:, i]).clamp(max=1))
        return torch.stack(joint, dim=1)
