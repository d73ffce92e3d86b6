"""EAGLE-3 draft heads: one decoder layer that reads the target's hidden states (Li et al., arXiv 2503.01840).

The head sees *pairs*: the token at a position, and the target's features at the position before, whose law that token
was drawn from. Features are hidden states of a low, a middle and a high layer of the target, fused by one matrix. From
the pairs so far follow the head's own state and from that the logits of the next token. Behind the committed tokens
there are no features; the head's state of the position before stands for them ("training-time test", section 3.1).

What a head computes of its pairs is in `eagle3_head`; here it is fed with them, step by step or along given outputs.

Symbols: B rows, N positions, D width of the head, F width of all features together, V target ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from spectoolkit.functional.ragged import ints, pad_rows, put_rows, row_lengths
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.cuda_graphs import Graphs
from spectoolkit.models.eagle3_head import Eagle3Head, head_dim
from spectoolkit.models.ragged_cache import RaggedCache, ragged_attention, ragged_mask

Row = tuple[int, ...]


@dataclass(frozen=True)
class Eagle3State:
    """Where the head stands in B sequences; the numbers and tokens are the host's.

    Attributes:
        cache: keys and values of its layer, one entry per pair.
        num_pairs: B numbers of pairs with the target's features in the cache.
        pending: B rows of tokens of pairs that are not cached yet.
        features: [B, >= P, F] of these, P the length of the longest row.
        states: [B, 1, D] the head's own state behind what it was fed last; None before.
    """

    cache: RaggedCache
    num_pairs: tuple[int, ...]
    pending: tuple[Row, ...]
    features: Tensor
    states: Tensor | None


@dataclass(frozen=True)
class Unrolled:
    """What a head has to remember of outputs that it walks along, step starts and depths in parallel (`unroll`).

    Attributes:
        prompt_keys, prompt_values: [B, H, M, size] of the pairs inside the prompt.
        prompt_mask: [B, 1, 1, M] additive.
        first_position: [B] position of the first row's pair.
        states: per depth, [B, n, D] of the rows so far.
        keys, values: per depth, [B, H, n, size].
    """

    prompt_keys: Tensor
    prompt_values: Tensor
    prompt_mask: Tensor
    first_position: Tensor
    states: tuple[Tensor, ...] = ()
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()


class Eagle3:
    """A head with the target that it drafts for: an `interfaces.DraftStream`.

    Attributes:
        head: the network; in evaluation its parameters have the target's dtype and device.
        vocab_size: V of the target; ids that the head lacks have logit -inf.
        feature_layers: the target's layers that it reads.
        graphs: whether its forward passes are captured as CUDA graphs, as the target's are.

    Args:
        embedding: of the tokens, where the head has one of its own.
    """

    def __init__(self, head: Eagle3Head, target: CausalLM, name: str, embedding: nn.Module | None = None) -> None:
        self.head = head
        self.name = name
        self.vocab_size = head.config.layer.vocab_size
        self.context_length = target.context_length
        self.device = target.device
        self.graphs = Graphs(target.graphs.switch, target.device, name)
        self.feature_layers = head.config.feature_layers
        self._embedding = target.hf_model.get_input_embeddings() if embedding is None else embedding

    @property
    def _dtype(self) -> torch.dtype:
        return self.head.fc.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, N, D] of tokens [B, N]; padding is embedded as any id."""
        return self._embedding(tokens.clamp(min=0)).to(self._dtype)

    # Live drafting.

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None) -> Eagle3State:
        """State of B fresh requests; `features` [B, L, F] of all prompt tokens but the last.

        A prompt of one token has no features before it; zeros stand for them.
        """
        rows, features = _pairs(prompts, self._checked(features))
        num_rows = len(rows)
        state = Eagle3State(RaggedCache(num_rows, self.device), (0,) * num_rows, rows, features, states=None)
        if features.shape[1] > 1:  # all but the last pair, so that drafting begins with one
            _, state = self._feed_pending(replace(state, pending=tuple(row[:-1] for row in rows)))
            last = ints([len(row) - 1 for row in rows], self.device)
            features = features.gather(1, last[:, None, None].expand(-1, 1, features.shape[2]))
        return replace(state, pending=tuple(row[-1:] for row in rows), features=features)

    @torch.inference_mode()
    def first(self, state: Eagle3State) -> tuple[Tensor, Eagle3State]:
        """Logits [B, 1, V] behind the committed tokens."""
        if any(state.pending):
            return self._feed_pending(state)
        assert state.states is not None
        return self.wide_logits(state.states), state

    @torch.inference_mode()
    def next(self, state: Eagle3State, tokens: Tensor) -> tuple[Tensor, Eagle3State]:
        """Logits [B, 1, V] behind drafts `tokens` [B, 1]."""
        assert state.states is not None
        states, logits = self._forward(state.cache, tokens, state.states, is_own=True)
        return logits, replace(state, states=states)

    @torch.inference_mode()
    def commit(self, state: Eagle3State, emitted: Sequence[Sequence[int]], features: Tensor | None) -> Eagle3State:
        """Drop the head's own states; the pairs of the `emitted` tokens with the target's `features` are fed next."""
        features = self._checked(features)
        pending = tuple(map(tuple, emitted))
        if any(state.pending):  # nothing was drafted in this step
            num_waiting = ints([len(row) for row in state.pending], self.device)
            at = num_waiting[:, None] + torch.arange(features.shape[1], device=self.device)
            wide = functional.pad(state.features, (0, 0, 0, features.shape[1]))
            features = wide.scatter(1, at[..., None].expand(-1, -1, wide.shape[2]), features.to(wide.dtype))
            pending = tuple((*waiting, *block) for waiting, block in zip(state.pending, pending, strict=True))
        state.cache.rollback(state.num_pairs)
        return replace(state, pending=pending, features=features)

    def select(self, state: Eagle3State, rows: Sequence[int]) -> Eagle3State:
        index = ints(rows, self.device)
        return Eagle3State(
            state.cache.select(rows),
            tuple(state.num_pairs[row] for row in rows),
            tuple(state.pending[row] for row in rows),
            state.features.index_select(0, index),
            None if state.states is None else state.states.index_select(0, index),
        )

    def insert(self, state: Eagle3State, rows: Sequence[int], other: Eagle3State) -> Eagle3State:
        width = max(state.features.shape[1], other.features.shape[1])
        num_pairs, pending = list(state.num_pairs), list(state.pending)
        for row, number, waiting in zip(rows, other.num_pairs, other.pending, strict=True):
            num_pairs[row], pending[row] = number, waiting

        def padded(features: Tensor) -> Tensor:
            return functional.pad(features, (0, 0, 0, width - features.shape[1]))

        state.cache.insert(rows, other.cache)
        return Eagle3State(
            state.cache,
            tuple(num_pairs),
            tuple(pending),
            put_rows(padded(state.features), rows, padded(other.features)),
            states=state.states,  # read again only after the pending pairs were fed
        )

    def wide_logits(self, states: Tensor) -> Tensor:
        """[B, N, V] of states [B, N, D]."""
        logits = self.head.logits(states)
        if logits.shape[-1] == self.vocab_size:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return wide.index_copy_(-1, self.head.draft_ids, logits)

    def _feed_pending(self, state: Eagle3State) -> tuple[Tensor, Eagle3State]:
        """Logits [B, 1, V] behind the pending pairs, of which there are some, and the state with them cached."""
        tokens = pad_rows(state.pending, self.device)
        features = state.features[:, : tokens.shape[1]]
        states, logits = self._forward(state.cache, tokens, features, is_own=False)
        num_pairs = tuple(number + len(row) for number, row in zip(state.num_pairs, state.pending, strict=True))
        state.cache.rollback(num_pairs)
        return logits, Eagle3State(state.cache, num_pairs, ((),) * len(num_pairs), features[:, :0], states=states)

    def _forward(self, cache: RaggedCache, tokens: Tensor, given: Tensor, is_own: bool) -> tuple[Tensor, ...]:
        """Append pairs of `tokens` [B, Q], padded, to every row; states [B, 1, D] and logits behind the last of each.

        `given`: the head's own states [B, Q, D], or features [B, Q, F].
        """

        def forward(positions: Tensor, tokens: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
            inputs = given if is_own else self.head.fuse(given)
            residual, queries, keys, values = self.head.project(self.embed(tokens), inputs, positions)
            keys, values = cache.update(keys, values, 0)
            num_queries = tokens.shape[1]
            mask = ragged_mask(
                len(tokens),
                num_queries,
                cache.get_mask_sizes(num_queries, 0)[0],
                cache.get_query_offset(),
                dtype=queries.dtype,
                device=queries.device,
            )
            attended, _ = ragged_attention(self.head, queries, keys, values, mask, scaling=queries.shape[-1] ** -0.5)
            states = self.head.finish(residual, attended.flatten(2))
            last = (row_lengths(tokens) - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[2])
            states = states.gather(1, last)
            return states, self.wide_logits(states)

        return cache.extend(self.graphs, forward, tokens, given, kind="own" if is_own else "features")

    def _checked(self, features: Tensor | None) -> Tensor:
        assert features is not None, "a draft head was not given the target's features"
        return features

    # Walking along given outputs.

    def unroll_start(self, prompts: Sequence[Sequence[int]], features: Tensor) -> Unrolled:
        """Begin behind `prompts`; `features` [B, L, F] of all their tokens but the last (see `start`)."""
        pairs, features = _pairs(prompts, features)
        tokens = pad_rows(pairs, self.device)
        lengths = row_lengths(tokens) - 1  # the last pair is the first row
        tokens, features = tokens[:, :-1], features[:, :-1]
        places = torch.arange(tokens.shape[1], device=self.device)
        keys, values = self.head.project_keys(
            self.embed(tokens), self.head.fuse(features), places.expand(len(prompts), -1)
        )
        mask = torch.zeros(tokens.shape, dtype=torch.float32, device=self.device)
        mask = mask.masked_fill_(places >= lengths[:, None], -torch.inf)[:, None, None]
        return Unrolled(keys, values, mask, lengths)

    def unroll(
        self, past: Unrolled, tokens: Tensor, features: Tensor, num_depths: int
    ) -> tuple[list[Tensor], Unrolled]:
        """The head's states behind `tokens` [B, W], the next ones of the outputs, for every depth.

        Row n stands before output token n (its pair holds token n - 1, the last prompt token for n = 0). At depth j
        the step began at row n - j: up to there the head saw `features` [B, W, F], since then its own states. All step
        starts are computed at once: a row attends to true pairs up to its start, and to the j own ones behind it.

        Returns:
            Per depth 0 .. num_depths - 1, states [B, W, D], meaningless where n < j; and what to go on from.
        """
        begin = past.keys[0].shape[2] if past.keys else 0
        width = tokens.shape[1]
        rows = torch.arange(begin, begin + width, device=self.device)
        positions = past.first_position[:, None] + rows
        embedded = self.embed(tokens)
        scale = head_dim(self.head.config.layer) ** -0.5
        found: list[Tensor] = []
        states: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(num_depths):
            if depth == 0:
                inputs = self.head.fuse(features)
            else:  # row n was fed the state of row n - 1
                inputs = functional.pad(states[depth - 1], (0, 0, 1, 0))[:, begin : begin + width]
            residual, queries, new_keys, new_values = self.head.project(embedded, inputs, positions)
            keys.append(_appended(past.keys, depth, new_keys))
            values.append(_appended(past.values, depth, new_values))
            attended = self._attend(past, queries, keys, values, rows, depth, scale)
            found.append(self.head.finish(residual, attended))
            states.append(_appended(past.states, depth, found[depth]))
        return found, replace(past, states=tuple(states), keys=tuple(keys), values=tuple(values))

    def _attend(
        self,
        past: Unrolled,
        queries: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rows: Tensor,
        depth: int,
        scale: float,
    ) -> Tensor:
        """Attention [B, W, heads * size] of `queries` [B, heads, W, size] at output rows `rows` and one depth.

        Keys: those of the prompt, true ones of rows <= n - depth, own ones of depth i at row n - depth + i.
        """
        num_heads, width = queries.shape[1:3]
        num_groups = num_heads // keys[0].shape[1]
        num_prompt, num_true = past.prompt_keys.shape[2], keys[0].shape[2]
        grouped = queries.unflatten(1, (-1, num_groups))  # [B, H, G, W, size]
        folded = grouped.flatten(2, 3)  # the queries that share a key head, so that keys are read in place
        wide = torch.promote_types(queries.dtype, torch.float32)

        def scores(some_keys: Tensor) -> Tensor:
            return (folded @ some_keys.transpose(2, 3)).unflatten(2, (num_groups, width)).to(wide) * scale

        # A row without a start sees itself, so that no row of the softmax is empty.
        start = (rows - depth).clamp(min=0)
        is_unseen = torch.arange(num_true, device=rows.device) > start[:, None]
        causal = torch.zeros(is_unseen.shape, dtype=wide, device=rows.device).masked_fill_(is_unseen, -torch.inf)
        own_rows = [(start + i).clamp(max=num_true - 1) for i in range(1, depth + 1)]
        own_keys = [keys[i][:, :, None, at] for i, at in enumerate(own_rows, 1)]
        own_values = [values[i][:, :, None, at] for i, at in enumerate(own_rows, 1)]
        own_scores = [(grouped * key).sum(-1, keepdim=True).to(wide) * scale for key in own_keys]
        all_scores = [scores(past.prompt_keys) + past.prompt_mask[:, None], scores(keys[0]) + causal, *own_scores]
        weights = torch.softmax(torch.cat(all_scores, dim=-1), dim=-1).to(values[0].dtype)
        of_prompt, of_true, *of_own = weights.split([num_prompt, num_true, *[1] * depth], dim=-1)
        attended = of_prompt.flatten(2, 3) @ past.prompt_values + of_true.flatten(2, 3) @ values[0]
        attended = attended.unflatten(2, (num_groups, width))
        for weight, value in zip(of_own, own_values, strict=True):
            attended = attended + weight * value
        return attended.flatten(1, 2).transpose(1, 2).flatten(2)


def _appended(kept: Sequence[Tensor], depth: int, new: Tensor) -> Tensor:
    """What is kept of a depth [.., n, size], if anything, with the new rows behind it."""
    return torch.cat([*kept[depth : depth + 1], new], dim=-2)


def _pairs(prompts: Sequence[Sequence[int]], features: Tensor) -> tuple[tuple[Row, ...], Tensor]:
    """B rows of tokens and features [B, P, F] of the pairs in `prompts`, at least one and at most P in each."""
    rows = tuple(tuple(prompt[1:]) or tuple(prompt) for prompt in prompts)
    return rows, functional.pad(features, (0, 0, 0, max(map(len, rows)) - features.shape[1]))
