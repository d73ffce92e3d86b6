"""A part of `cpu_settings`: what a forward pass takes on the package's cache, and on one that concatenates.

`RaggedCache` writes new keys and values into buffers and has the attention read them there. `DynamicCache` of
transformers makes all of them anew in every layer of every pass, and has one length for all rows: where rows differ,
they are padded on the left and masked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from spectoolkit.errors import UsageError
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.ragged_cache import RaggedCache
from spectoolkit.studies.engines import plain_attention

IN_PLACE = "in place"
SAME_ATTENTION, OWN_ATTENTION = "DynamicCache, same attention", "DynamicCache, attention of transformers"
EQUAL, RAGGED = "equal", "from half to all"

NUM_KEPT = 2
"""Tokens that a row keeps of every step, in all rows: a `DynamicCache` can be cut by one number only."""


class Passes(Protocol):
    """Forward passes over one cache."""

    def attention(self) -> AbstractContextManager[None]:
        """While it is entered, the model has the attention that goes with the cache."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [B, Q]; their logits [B, Q, V]."""
        ...

    def cut(self, num_tokens: int) -> None:
        """Take the last `num_tokens` of every row off again."""
        ...


class InPlace:
    """As the decoding loop does it."""

    def __init__(self, target: CausalLM, state: RaggedCache) -> None:
        self._target, self._state = target, state

    def attention(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, tokens: Tensor) -> Tensor:
        return self._target.score(self._state, tokens)[0]

    def cut(self, num_tokens: int) -> None:
        self._target.rollback(self._state, [length - num_tokens for length in self._state.host_lengths])


class Concatenated:
    """As transformers does it, from the keys and values of `state` on.

    Args:
        has_own_attention: transformers' attention; else that of the package, which only equal lengths can have.
    """

    @torch.inference_mode()
    def __init__(self, target: CausalLM, state: RaggedCache, *, has_own_attention: bool) -> None:
        self._target, self._has_own_attention = target, has_own_attention
        lengths = state.host_lengths
        self._lengths = state.lengths.clone()
        self._padding = max(lengths) - self._lengths
        with plain_attention([target.hf_model]):  # the cache that the model makes itself, emptied again
            self._cache = target.hf_model(torch.zeros(len(lengths), 1, dtype=torch.long), use_cache=True).cache
        self._cache.crop(-1)
        for number, layer in enumerate(cast(Any, state).layers):
            self._cache.update(_on_the_right(layer.keys, lengths), _on_the_right(layer.values, lengths), number)

    def attention(self) -> AbstractContextManager[None]:
        return plain_attention([self._target.hf_model]) if self._has_own_attention else nullcontext()

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        num_queries, mask = tokens.shape[1], None
        if self._padding.any():
            slots = torch.arange(self._cache.get_seq_length() + num_queries)
            mask = (slots >= self._padding[:, None]).long()
        output = self._target.hf_model(
            input_ids=tokens,
            position_ids=self._lengths[:, None] + torch.arange(num_queries),
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
        )
        self._lengths = self._lengths + num_queries
        return output.logits

    def cut(self, num_tokens: int) -> None:
        self._cache.crop(-num_tokens)
        self._lengths = self._lengths - num_tokens


@dataclass(frozen=True)
class CacheCase:
    """One cache with a batch in it.

    Attributes:
        settings: columns of the table: context (tokens of the longest row), lengths, cache.
        tokens: [B, Q] of every step.
    """

    settings: dict[str, object]
    passes: Passes
    tokens: Tensor


def cases_of(
    target: CausalLM, contexts: Sequence[int], num_rows: int, num_queries: int, num_steps: int
) -> list[CacheCase]:
    """The caches at every context, rows of equal and of different lengths, with random tokens in them.

    Raises:
        UsageError: a context that leaves the target no room for the steps.
    """
    generator = torch.Generator().manual_seed(0)
    most = target.context_length - num_steps * NUM_KEPT - num_queries
    if max(contexts) > most:
        raise UsageError(f"study.contexts: expected at most {most} tokens, so that steps fit, got {max(contexts)}")
    cases = []
    for context in contexts:
        for name, shortest in ((EQUAL, context), (RAGGED, context // 2)):
            lengths = torch.linspace(shortest, context, num_rows).round().long().tolist()
            prefixes = torch.randint(target.vocab_size, (num_rows, context), generator=generator).tolist()
            state = target.prefill([prefix[:length] for prefix, length in zip(prefixes, lengths, strict=True)])
            tokens = torch.randint(target.vocab_size, (num_rows, num_queries), generator=generator)
            made: dict[str, Passes] = {IN_PLACE: InPlace(target, state)}
            if name == EQUAL:
                made[SAME_ATTENTION] = Concatenated(target, state, has_own_attention=False)
            made[OWN_ATTENTION] = Concatenated(target, state, has_own_attention=True)
            cases += [
                CacheCase({"context": context, "lengths": name, "cache": cache}, passes, tokens)
                for cache, passes in made.items()
            ]
    return cases


def step_s(case: CacheCase, num_steps: int) -> float:
    """Seconds per step of Q tokens of which `NUM_KEPT` are kept; the cache is then as it was before."""
    num_queries = case.tokens.shape[1]
    with case.passes.attention():
        begin = time.perf_counter()
        for _ in range(num_steps):
            case.passes.step(case.tokens)
            case.passes.cut(num_queries - NUM_KEPT)
        wall_s = time.perf_counter() - begin
    case.passes.cut(num_steps * NUM_KEPT)
    return wall_s / num_steps


def _on_the_right(states: Tensor, lengths: Sequence[int]) -> Tensor:
    """Of states [B, H, any, D] the first `lengths` of each row, moved to the right end of [B, H, max(lengths), D]."""
    moved = states.new_zeros((*states.shape[:2], max(lengths), states.shape[3]))
    for row, length in enumerate(lengths):
        moved[row, :, max(lengths) - length :] = states[row, :, :length]
    return moved
