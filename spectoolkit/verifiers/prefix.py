"""The end of a step for rules that test token after token: accept the prefix that passes, then draw one token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spectoolkit.datatypes import Proposal, Uniforms, Verdict
from spectoolkit.functional.acceptance import emitted_block, is_drafted, prefix_length, take
from spectoolkit.functional.draw import draw
from spectoolkit.verifiers.draft_law import both_probs

Recover = Callable[[Tensor, Proposal, Tensor], Tensor]
"""Target row [B, V], proposal and position [B] -> weights [B, V] of the recovered token (`draft_law.residual_at`)."""


def ratio_test(target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Tensor:
    """Which drafts [B, K] pass u_i < p_i(x_i) / q_i(x_i), each on its own; False past a proposal's length.

    Raises:
        ContractError: a drafted token that its law gives no probability, or a law that does not say q.
    """
    drafted = is_drafted(proposal.lengths, proposal.tokens.shape[1])
    p, q = both_probs(target_probs, proposal)
    return drafted & (uniforms.accept * q < p)


def prefix_verdict(
    accepted: Tensor, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms, recover: Recover
) -> Verdict:
    """Accept the drafts in front of the first one that is not `accepted` [B, K], which is False past the lengths.

    At the first rejected position n the output goes on with a token of the weights that `recover` gives, behind a whole
    accepted proposal with a sample of p_n; both are drawn with `emit[:, n]`. `accepted` becomes `judged_alone`.
    """
    num_accepted = prefix_length(accepted)
    row = take(target_probs, num_accepted)
    is_bonus = num_accepted == proposal.lengths
    weights = recover(row, proposal, num_accepted)
    if not is_bonus.is_cpu or any(is_bonus.tolist()):  # nothing waits on a CPU
        weights = torch.where(is_bonus[:, None], row, weights)
    last = draw(weights, take(uniforms.emit, num_accepted))
    return Verdict(num_accepted, emitted_block(proposal.tokens, num_accepted, last), judged_alone=accepted)
