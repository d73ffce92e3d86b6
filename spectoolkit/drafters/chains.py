"""Drafting several chains of tokens behind the same prefix, of which one may be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from spectoolkit.datatypes import PAD, Chains, DraftLaw, DraftNoise, Proposal
from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import without
from spectoolkit.functional.draw import draw
from spectoolkit.functional.ragged import few_ints, repeated
from spectoolkit.sampling import SamplingState


@dataclass(frozen=True)
class ChainsDrafter(ModelDrafter):
    """C chains of K tokens, each drawn as `ModelDrafter` draws one; rows are kept at every draft temperature.

    With replacement the chains are independent. Without, their first tokens differ, x_c ~ norm(q without x_1 ..
    x_{c-1}), and behind them each chain is drawn from its own rows. Where q has fewer than C tokens the last chains do
    not exist, and hold `PAD`.

    The first forward of a step has a row per sequence, as all chains share it; the others have C. The draft model sees
    the accepted tokens again at the next step, as what it computed for a chain is dropped.

    Attributes:
        num_chains: C.
        with_replacement: whether the chains are independent.

    Raises:
        UsageError: `num_chains` < 1, or what `ModelDrafter` refuses.

    Reference: with replacement Sun et al., arXiv 2310.15141, "SpecTr"; without, Jeon et al., arXiv 2402.14160,
    "Recursive speculative decoding", whose trees branch behind the first token too.
    """

    num_chains: int = 4
    with_replacement: bool = True

    draws_pads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_chains < 1:
            raise UsageError(f"drafter.num_chains: expected an integer >= 1, got {self.num_chains!r}")

    @property
    def laws(self) -> tuple[type[DraftLaw], ...]:
        return (Chains,)

    @property
    def is_argmax(self) -> bool:
        return False

    def bytes_per_token(self, vocab_size: int) -> int:
        return Chains(torch.empty(1, self.num_chains, 0, 0), self.with_replacement).bytes_per_token(vocab_size)

    def propose(
        self, state: Any, sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Proposal, Any]:
        num_rows, num_chains, num_draft_tokens = noise.uniforms.shape
        if num_draft_tokens == 0:
            device = noise.uniforms.device
            tokens = torch.empty((num_rows, num_chains, 0), dtype=torch.int64, device=device)
            rows = torch.empty((num_rows, num_chains, 0, self.vocab_size), device=device)
            return Proposal(tokens, few_ints(max_tokens, device), Chains(rows, self.with_replacement)), state
        logits, state = self.stream.first(state)
        # Of several chains a copy is fed; with one, the state itself goes on, as in `ModelDrafter`.
        copied = state if num_chains == 1 else self.stream.select(state, repeated(num_rows, num_chains))
        drawn, fed = self.draw_tokens(
            logits.repeat_interleave(num_chains, 0),
            copied,
            sampling.repeat(num_chains),
            [budget for budget in max_tokens for _ in range(num_chains)],
            DraftNoise(noise.uniforms.flatten(0, 1)),
        )
        tokens, rows = (part.unflatten(0, (num_rows, num_chains)) for part in (drawn.tokens, drawn.fields[0]))
        faults = None if drawn.faults is None else drawn.faults.unflatten(0, (num_rows, num_chains))
        proposal = Proposal(tokens, few_ints(max_tokens, tokens.device), Chains(rows, self.with_replacement), faults)
        return proposal, fed if num_chains == 1 else state

    def sample(self, probs: Tensor, noise: DraftNoise, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        if index > 0 or self.with_replacement:
            return super().sample(probs, noise, index)
        rest = probs[:: self.num_chains]  # one row per sequence: its chains share the first
        uniforms = noise.uniforms[:, 0].unflatten(0, (-1, self.num_chains))
        first: list[Tensor] = []
        for chain in range(self.num_chains):
            drawn = draw(rest, uniforms[:, chain]).masked_fill(~(rest.amax(-1) > 0), PAD)
            rest = without(rest, drawn)
            first.append(drawn)
        return torch.stack(first, dim=1).flatten(), (probs,)
