"""A toy language model whose laws are a table: every probability is known exactly, and a forward pass costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from spectoolkit.errors import ContractError, UsageError
from spectoolkit.functional.ragged import to_device
from spectoolkit.interfaces import Part
from spectoolkit.prompts import Prompt

_MAX_TABLE_ENTRIES = 10_000_000


class TabularTokenizer:
    """Bytes as tokens: a byte b becomes (b - ord("a")) mod V, so that "abc..." are the tokens 0, 1, 2, ..."""

    def __init__(self, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids

    def encode(self, prompt: Prompt, chat_template: bool) -> list[int]:
        """Tokens of the prompt's text, or of its messages one after the other; there is no chat template to apply."""
        texts = [prompt.text] if prompt.messages is None else [message.content for message in prompt.messages]
        return [(byte - ord("a")) % self.vocab_size for text in texts for byte in (text or "").encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """One letter per token, counted from "a"."""
        return "".join(chr(ord("a") + token) for token in tokens)


@dataclass(frozen=True, slots=True)
class TabularState:
    """Cached tokens.

    Attributes:
        tokens: [B, m + any]; column m + i holds token i, the first m columns are the padding with token 0.
        lengths: [B] tokens per row, on the host.
    """

    tokens: Tensor
    lengths: Tensor


class TabularModel:
    """Markov model of order m: `interfaces.LanguageModel` with logits log rows[x_{n-m+1}, .., x_n] in float64.

    A context of fewer than m tokens counts as if tokens 0 stood before it.

    Args:
        rows: [V, .., V] with m + 1 axes; entries are probabilities and the last axis sums to 1.
        name: what messages call it.
        context_length: tokens that a row can hold.
        stop_ids: tokens that end an output.

    Raises:
        UsageError: rows that are not such a table, or stop ids outside it.
    """

    def __init__(
        self, rows: Tensor, name: str = "tabular", context_length: int = 4096, stop_ids: Sequence[int] = ()
    ) -> None:
        rows = rows.to(torch.float64)
        if rows.dim() < 1 or len(set(rows.shape)) != 1:
            raise UsageError(f"rows: expected a table [V, .., V], got shape {list(rows.shape)}")
        if not bool((rows >= 0).all()) or not torch.allclose(rows.sum(-1), rows.new_ones(())):
            raise UsageError("rows: expected probabilities that sum to 1 along the last axis")
        self.rows = rows
        self.name = name
        self.order = rows.dim() - 1
        self.vocab_size = rows.shape[-1]
        self.context_length = context_length
        self.device = rows.device
        if not all(0 <= token < self.vocab_size for token in stop_ids):
            raise UsageError(f"stop_ids: expected tokens below {self.vocab_size}, got {list(stop_ids)}")
        self.tokenizer = TabularTokenizer(self.vocab_size, frozenset(stop_ids))
        self._logits = rows.log().reshape(-1, self.vocab_size)

    def prefill(self, prefixes: Sequence[Sequence[int]]) -> TabularState:
        """State with `prefixes` cached, one row each. A prefix may be empty."""
        lengths = torch.tensor([len(prefix) for prefix in prefixes], dtype=torch.long)
        width = max(map(len, prefixes), default=0)
        padded = [[*[0] * self.order, *prefix, *[0] * (width - len(prefix))] for prefix in prefixes]
        tokens = torch.tensor(padded, dtype=torch.long, device=self.device).reshape(len(prefixes), self.order + width)
        return TabularState(tokens, lengths)

    def score(self, state: TabularState, tokens: Tensor) -> tuple[Tensor, TabularState]:
        """Logits [B, Q, V] of the token after each of `tokens` [B, Q], and the longer state."""
        num_rows, num_queries = tokens.shape
        if num_rows != len(state.lengths):
            raise ContractError(f"score: expected tokens of {len(state.lengths)} rows, got {num_rows}")
        longest = int(state.lengths.max()) if num_rows else 0
        if longest > self.context_length:
            raise UsageError(f"{self.name}: expected at most {self.context_length} tokens of context")
        can_ask = self.device.type == "cpu" and tokens.numel() > 0  # elsewhere asking would wait for the device
        if can_ask and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ContractError(f"score: expected tokens in [0, {self.vocab_size}), got {tokens.tolist()}")
        buffer = torch.zeros(num_rows, self.order + longest + num_queries, dtype=torch.long, device=self.device)
        kept = min(buffer.shape[1], state.tokens.shape[1])
        buffer[:, :kept] = state.tokens[:, :kept]
        ends = to_device(state.lengths, self.device)[:, None] + torch.arange(num_queries, device=self.device)
        buffer.scatter_(1, ends + self.order, tokens.to(self.device))
        context = torch.zeros_like(ends)
        for back in reversed(range(self.order)):
            context = context * self.vocab_size + buffer.gather(1, ends + self.order - back)
        return self._logits[context], TabularState(buffer, state.lengths + num_queries)

    def score_parts(
        self, state: TabularState, parts: Sequence[Part], num_tokens: int
    ) -> tuple[list[Tensor], TabularState]:
        """See `interfaces.PartsModel`."""
        longest = int(state.lengths.max()) if len(state.lengths) else 0
        width = self.order + longest + num_tokens
        buffer = torch.nn.functional.pad(state.tokens, (0, max(0, width - state.tokens.shape[1])))
        lengths = to_device(state.lengths, self.device)
        scored = []
        for rows, offsets, tokens in parts:
            steps = torch.arange(tokens.shape[1], device=self.device)
            ends = (lengths[rows] + offsets)[:, None] + steps + self.order
            buffer[rows[:, None], ends] = tokens
            context = torch.zeros_like(ends)
            for back in reversed(range(self.order)):
                context = context * self.vocab_size + buffer[rows[:, None], ends - back]
            scored.append(self._logits[context])
        return scored, TabularState(buffer, state.lengths + num_tokens)

    def rollback(self, state: TabularState, lengths: Sequence[int]) -> TabularState:
        """Keep the first `lengths[b]` tokens of every row b."""
        current = state.lengths.tolist()
        if len(lengths) != len(current) or any(not 0 <= new <= old for new, old in zip(lengths, current, strict=True)):
            raise ContractError(
                f"rollback: expected a length between 0 and the current one for each row, {current}; "
                f"got {list(lengths)}"
            )
        return TabularState(state.tokens, torch.tensor(lengths, dtype=torch.int64))

    def select(self, state: TabularState, rows: Sequence[int]) -> TabularState:
        """The state of `rows`, in that order."""
        index = torch.tensor(list(rows), dtype=torch.long)
        return TabularState(state.tokens[to_device(index, self.device)], state.lengths[index])

    def insert(self, state: TabularState, rows: Sequence[int], other: TabularState) -> TabularState:
        """`state` with its `rows` replaced by the rows of `other`, in order."""
        if len(rows) != len(other.lengths):
            raise ContractError(f"insert: expected {len(rows)} rows for {list(rows)}, got {len(other.lengths)}")
        width = max(state.tokens.shape[1], other.tokens.shape[1])
        tokens = torch.nn.functional.pad(state.tokens, (0, width - state.tokens.shape[1]))
        lengths = state.lengths.clone()
        index = torch.tensor(list(rows), dtype=torch.long)
        tokens[to_device(index, self.device)] = torch.nn.functional.pad(
            other.tokens, (0, width - other.tokens.shape[1])
        )
        lengths[index] = other.lengths
        return TabularState(tokens, lengths)


def random_tabular(
    vocab_size: int = 8, order: int = 2, concentration: float = 1.0, seed: int = 0, stop_ids: Sequence[int] = ()
) -> TabularModel:
    """A model whose rows are drawn from a symmetric Dirichlet law; a small `concentration` gives peaked rows."""
    return TabularModel(_random_rows(vocab_size, order, concentration, seed), stop_ids=stop_ids)


def blend_tabular(target: object, weight: float, seed: int = 1, concentration: float = 1.0) -> TabularModel:
    """A draft model for `target` with rows weight * (the target's) + (1 - weight) * (random rows, as above)."""
    if not isinstance(target, TabularModel):
        raise UsageError(f"draft_model: expected a tabular target for a tabular draft, got {type(target).__name__}")
    if not 0 <= weight <= 1:
        raise UsageError(f"weight: expected a number in [0, 1], got {weight!r}")
    noise = _random_rows(target.vocab_size, target.order, concentration, seed)
    draft = TabularModel(
        weight * target.rows + (1 - weight) * noise,
        name=f"tabular blend {weight:g}",
        context_length=target.context_length,
        stop_ids=sorted(target.tokenizer.stop_ids),
    )
    draft.tokenizer = target.tokenizer
    return draft


def _random_rows(vocab_size: int, order: int, concentration: float, seed: int) -> Tensor:
    if vocab_size < 1 or order < 0 or vocab_size ** (order + 1) > _MAX_TABLE_ENTRIES:
        raise UsageError(
            f"vocab_size, order: expected a table of 1 to {_MAX_TABLE_ENTRIES} entries vocab_size^(order + 1), "
            f"got {vocab_size!r} and {order!r}"
        )
    if not 0 < concentration <= 1e9:
        raise UsageError(f"concentration: expected a finite number > 0, got {concentration!r}")
    if seed < 0:
        raise UsageError(f"seed: expected an integer >= 0, got {seed!r}")
    rows = numpy.random.default_rng(seed).dirichlet([concentration] * vocab_size, size=vocab_size**order)
    return torch.from_numpy(rows).reshape([vocab_size] * (order + 1))
