"""Recursive rejection sampling: several drafts for a position are tried one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.datatypes import Chains, Proposal, Uniforms, Verdict
from spectoolkit.functional.acceptance import emitted_block, is_drafted, probs_of, residual, take
from spectoolkit.functional.draw import draw
from spectoolkit.verifiers.draft_law import candidate_probs, check_chains


@dataclass(frozen=True)
class Recursive:
    """Try the chains that begin with the accepted prefix; what one leaves of the target is the target of the next.

        candidates x_1 .. x_m for position n, drawn from q_1 .. q_m; p_1 = p_n
        accept x_i         if u_i < p_i(x_i) / q_i(x_i), and go on with the chains that have x_i there
        else               p_{i+1} = norm((p_i - q_i)+)
        recovered token    ~ p_{m+1}    if none is accepted
        bonus token        ~ p_{K+1}    behind a whole accepted chain

    With replacement every q_i is the draft's row q; without, q_i = norm(q without x_1 .. x_{i-1}), so that a token is
    not tried twice. One chain is `Rejection`.

    It gains acceptance length alone: the target's forward has C times the rows of an ordinary step and its cache is
    copied for every chain, so a step costs C forwards' worth of compute. It can pay only where that is not what limits.

    Reference: Miao et al., arXiv 2305.09781, "SpecInfer", multi-step speculative sampling; without replacement Jeon et
    al., arXiv 2402.14160, recursive rejection sampling. We compare u * q(x) < p(x) in float64, as `Rejection` does, and
    keep p_i in float64.
    Laws: Chains. Lossless. `judged_alone` is True in the accepted prefix, False at the position where every candidate
    was rejected, and behind it the test of `Rejection` along the chain that the verdict names.

    Noise: u_i is `accept[:, c, n]` of the candidate's chain c; the token at position n is drawn with `emit[:, n]`.
    """

    laws = (Chains,)
    is_lossless = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`; here `target_probs` is [B, C, K+1, V].

        Raises:
            ContractError: a drafted token that its law gives no probability, or a law this rule cannot judge.
        """
        law = check_chains(proposal)
        tokens, lengths = proposal.tokens, proposal.lengths
        num_rows, num_chains, num_draft_tokens = tokens.shape
        survives = torch.ones((num_rows, num_chains), dtype=torch.bool, device=tokens.device)
        chain, num_accepted = torch.zeros_like(lengths), torch.zeros_like(lengths)
        rest = target_probs[:, 0, 0].to(torch.float64)
        for n in range(num_draft_tokens):
            is_open = (num_accepted == n) & (n < lengths)
            p = torch.where(is_open[:, None], take(target_probs[:, :, n], chain).to(torch.float64), rest)
            accepted, rest = _try_candidates(p, law, tokens, n, survives & is_open[:, None], uniforms.accept[:, :, n])
            has_token = survives & (tokens[:, :, n] == accepted[:, None])
            survives = torch.where(accepted[:, None] >= 0, has_token, survives)
            chain = survives.to(torch.int64).argmax(-1)
            num_accepted = num_accepted + (accepted >= 0)

        own_rows = take(target_probs, chain)
        is_bonus = (num_accepted == lengths)[:, None]
        weights = torch.where(is_bonus, take(own_rows, num_accepted).to(torch.float64), rest)
        last = draw(weights, take(uniforms.emit, num_accepted))

        own_tokens = take(tokens, chain)
        position = torch.arange(num_draft_tokens, device=tokens.device)
        is_behind = (position > num_accepted[:, None]) & is_drafted(lengths, num_draft_tokens)
        q = torch.where(is_behind, probs_of(take(law.probs, chain), own_tokens), 0)
        passes = is_behind & (take(uniforms.accept, chain) * q < probs_of(own_rows[:, :-1], own_tokens))
        judged_alone = (position < num_accepted[:, None]) | passes
        return Verdict(num_accepted, emitted_block(own_tokens, num_accepted, last), judged_alone, chain)


def _try_candidates(
    p: Tensor, law: Chains, tokens: Tensor, position: int, is_candidate: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Try the candidates [B, C] of a position against p [B, V], with a uniform [B, C] each.

    Returns:
        The accepted tokens [B], -1 for none, and what the rejected ones left of p [B, V].
    """
    accepted = torch.full_like(tokens[:, 0, 0], -1)
    for chain in range(tokens.shape[1]):
        token = tokens[:, chain, position]
        is_tried = is_candidate[:, chain] & (accepted < 0) & (token >= 0)
        if is_tried.device.type == "cpu" and not is_tried.any():  # elsewhere asking would wait for the device
            continue
        q = candidate_probs(law, tokens, chain, position)
        # A uniform that decides nothing is multiplied by 0, so that enumeration does not branch on it.
        scale = torch.where(is_tried, probs_of(q, token), 0)
        passes = is_tried & (uniforms[:, chain] * scale < probs_of(p, token))
        accepted = torch.where(passes, token, accepted)
        left = residual(p, q)
        p = torch.where((is_tried & ~passes)[:, None], left / left.sum(-1, keepdim=True), p)
    return accepted, p
