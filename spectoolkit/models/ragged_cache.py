"""A key-value cache in which every row has its own length, and the attention that goes with it.

transformers asks a cache for the offset of its queries and hands that to the mask function of the model's attention
implementation. `RaggedCache` answers with one offset per row, and the implementation registered here (`ATTENTION`)
builds its mask from them. So full attention, sliding windows and models that mix both work without knowing of rows,
and a rollback is nothing but a smaller number.

Slots at and behind a row's length hold zeros or rolled-back entries; every mask leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from spectoolkit.errors import ContractError, UsageError
from spectoolkit.functional.ragged import ints
from spectoolkit.models.cuda_graphs import Forward, GraphedForwards, Graphs

ATTENTION = "spectoolkit_ragged"

# Sizes are multiples of this: CUDA's fused attention copies masks whose rows are not aligned.
_ALIGNMENT = 8

# Slots that a captured forward pass sees come in steps of this, or of an eighth of them where that is more.
_BUCKET = 128

# Forward passes over more tokens per row keep the device busy without being captured.
_MAX_CAPTURED_QUERIES = 32


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def bucket(size: int) -> int:
    """The slots that a captured forward pass sees which needs `size` of them."""
    step = max(_BUCKET, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


@dataclass(slots=True)
class _Append:
    """Where the keys and values of one forward pass go; made once and used by all layers.

    Attributes:
        num_visible: cache slots that the attention sees.
        start: the length that all rows share, or None if they differ.
        positions: [B, Q] slot of each new entry.
        index: flat slots [B * H * Q] in a buffer [B * H * capacity], by (H, capacity); filled on first use.
    """

    num_visible: int
    start: int | None
    positions: Tensor
    index: dict[tuple[int, int], Tensor]

    def flat_index(self, num_heads: int, capacity: int) -> Tensor:
        key = (num_heads, capacity)
        if key not in self.index:
            num_rows = self.positions.shape[0]
            heads = torch.arange(num_rows * num_heads, device=self.positions.device).view(num_rows, num_heads, 1)
            self.index[key] = (heads * capacity + self.positions[:, None, :]).view(-1)
        return self.index[key]


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers [B, H, capacity, D] that double when they are full."""

    # Never None once `lazy_initialization` has run.
    keys: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]  # None only before the first use
    values: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers for B rows with the heads, widths and type of these states [B, H, any, D]."""
        # Zeros and not uninitialised memory: a masked slot has weight 0, and 0 times NaN is NaN.
        self.keys = key_states.new_zeros((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots per row."""
        current = self.keys.shape[2]
        if capacity > current:
            capacity = max(aligned(capacity), 2 * current)
            padding = (0, 0, 0, capacity - current)
            self.keys = functional.pad(self.keys, padding)  # pyright: ignore[reportIncompatibleVariableOverride]
            self.values = functional.pad(self.values, padding)  # pyright: ignore[reportIncompatibleVariableOverride]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write states [B, H, Q, D] where `args[0]` (an `_Append`) says; return the slots that are seen."""
        append: _Append = args[0]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.reserve(append.num_visible)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if append.start is not None:
                buffer[:, :, append.start : append.start + states.shape[2]] = states
            else:
                index = append.flat_index(buffer.shape[1], buffer.shape[2])
                buffer.view(-1, buffer.shape[3]).index_copy_(0, index, states.reshape(-1, states.shape[3]))
        return self.keys[:, :, : append.num_visible], self.values[:, :, : append.num_visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotImplementedError("the cache knows the lengths, its layers do not")

    def get_seq_length(self) -> int:
        raise NotImplementedError("the cache knows the lengths, its layers do not")

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """Cache of B rows with one length each.

    Both sides know the lengths, so that no step has to wait for the device.

    Attributes:
        lengths: [B] number of cached tokens of each row, on the device.
        host_lengths: the same on the host.
        num_rollbacks: how often the rows were cut.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.host_lengths = [0] * num_rows
        self.num_rollbacks = 0
        self._append: _Append | None = None
        self._graphed = GraphedForwards()

    @property
    def longest(self) -> int:
        """The length of the longest row."""
        return max(self.host_lengths, default=0)

    def extend(self, graphs: Graphs, forward: Forward, *inputs: Tensor, kind: str = "") -> tuple[Tensor, ...]:
        """What `forward(positions [B, Q], *inputs)` gives, which appends Q tokens to every row.

        Replayed as a CUDA graph where `graphs` and the shape allow it: `forward` is not called then, so it may depend
        on nothing but its arguments, this cache and weights that stay where they are.

        Args:
            inputs: [B, Q, ...] the first, [B, ...] the others.
            kind: tells different functions of inputs of equal shapes apart.
        """
        num_queries = inputs[0].shape[1]
        outputs = None
        if graphs.capture is not None and num_queries <= _MAX_CAPTURED_QUERIES:
            outputs = self._replayed(graphs, forward, inputs, kind)
        graphs.note_pass()
        if outputs is None:
            outputs = forward(self.begin(num_queries), *inputs)
        self.end(num_queries)
        return outputs

    def _replayed(
        self, graphs: Graphs, forward: Forward, inputs: Sequence[Tensor], kind: str
    ) -> tuple[Tensor, ...] | None:
        num_queries = inputs[0].shape[1]
        num_visible = bucket(self.longest + num_queries)
        # From the first pass on, so that the buffers stay where they are when a shape has come often enough.
        for layer in self._ragged_layers():
            layer.reserve(num_visible)

        def static(lengths: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            positions = lengths[:, None] + torch.arange(num_queries, device=lengths.device)
            self._append = _Append(num_visible, None, positions, {})
            try:
                return forward(positions, *given)
            finally:
                self._append = None

        shape = (kind, num_visible, *((given.shape, given.dtype) for given in inputs))
        buffers = [buffer for layer in self._ragged_layers() for buffer in (layer.keys, layer.values)]
        return self._graphed.run(graphs, shape, self.num_rollbacks, buffers, (self.lengths, *inputs), static)

    def begin(self, num_queries: int) -> Tensor:
        """Prepare a forward pass over `num_queries` new tokens per row; their positions [B, Q]."""
        longest, is_uniform = self.longest, len(set(self.host_lengths)) == 1
        positions = self.lengths[:, None] + torch.arange(num_queries, device=self.lengths.device)
        needs_mask = not is_uniform or (num_queries > 1 and longest > 0)
        num_visible = longest + num_queries
        self._append = _Append(
            num_visible=aligned(num_visible) if needs_mask else num_visible,
            start=longest if is_uniform else None,
            positions=positions,
            index={},
        )
        return positions

    def end(self, num_queries: int) -> None:
        """Finish the forward pass that `begin` prepared: all rows are longer by `num_queries`."""
        self.lengths = self.lengths + num_queries
        self.host_lengths = [length + num_queries for length in self.host_lengths]
        self._append = None

    def append_features(self, features: Tensor) -> None:
        """Keep features [B, Q, F] of the tokens of the forward pass that is going on, behind its keys and values.

        They are the keys of one more layer, so that they are rolled back, selected and inserted like all others.
        """
        nothing = features.new_zeros((len(features), 1, features.shape[1], 1))
        self.update(features[:, None], nothing, self._feature_layer(features.shape[-1]))

    def _feature_layer(self, width: int) -> int:
        """Number of the layer that holds features: the last, told from attention's by its width."""
        layers = self._ragged_layers()
        is_there = bool(layers) and layers[-1].values.shape[-1] == 1 and layers[-1].keys.shape[-1] == width
        return len(layers) - is_there

    def last_features(self, num_tokens: Sequence[int], width: int, dtype: torch.dtype) -> Tensor:
        """[B, max(num_tokens), width] of the last `num_tokens[b]` tokens of every row b, then zeros."""
        device, longest = self.lengths.device, max(num_tokens, default=0)
        if not self.layers or longest == 0:
            return torch.zeros(len(num_tokens), longest, width, dtype=dtype, device=device)
        kept = self._ragged_layers()[-1].keys[:, 0]
        columns = torch.arange(longest, device=device)
        counts = ints(num_tokens, device)
        at = (self.lengths - counts)[:, None] + columns
        taken = kept.gather(1, at.clamp(0, kept.shape[1] - 1)[..., None].expand(-1, -1, width))
        return taken.masked_fill((columns >= counts[:, None])[..., None], 0)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[b]` entries of every row b.

        Raises:
            ContractError: another number of lengths, or a row is shorter than that.
        """
        current = self.host_lengths
        if len(lengths) != len(current) or any(not 0 <= new <= old for new, old in zip(lengths, current, strict=True)):
            raise ContractError(f"rollback: expected at most the current lengths {current}, got {list(lengths)}")
        self.lengths = ints(lengths, self.lengths.device)
        self.host_lengths = list(lengths)
        self.num_rollbacks += 1

    def select(self, rows: Sequence[int]) -> RaggedCache:
        """The cache of `rows`, in that order."""
        if list(rows) == list(range(len(self.lengths))):
            return self
        index = ints(rows, self.lengths.device)
        selected = RaggedCache(len(rows), self.lengths.device)
        selected.lengths = self.lengths[index]
        selected.host_lengths = [self.host_lengths[row] for row in rows]
        used = aligned(selected.longest)
        for layer in self._ragged_layers():
            copy = RaggedLayer()
            copy.keys = layer.keys[:, :, :used].index_select(0, index)
            copy.values = layer.values[:, :, :used].index_select(0, index)
            copy.is_initialized = True
            selected.layers.append(copy)
        return selected

    def insert(self, rows: Sequence[int], other: RaggedCache) -> None:
        """Replace `rows` by the rows of `other`, in order."""
        if len(rows) != len(other.lengths):
            raise ContractError(f"insert: expected {len(rows)} rows for {list(rows)}, got {len(other.lengths)}")
        index = ints(rows, self.lengths.device)
        self.lengths = self.lengths.index_copy(0, index, other.lengths)
        self.host_lengths = list(self.host_lengths)
        for row, length in zip(rows, other.host_lengths, strict=True):
            self.host_lengths[row] = length
        used = other.longest
        for number, source in enumerate(other._ragged_layers()):
            if number == len(self.layers):
                layer = RaggedLayer()
                shape = (len(self.lengths), -1, -1, -1)
                layer.lazy_initialization(source.keys[:1].expand(shape), source.values[:1].expand(shape))
                self.layers.append(layer)
            layer = self._ragged_layers()[number]
            layer.reserve(used)
            layer.keys[index, :, :used] = source.keys[:, :, :used]
            layer.values[index, :, :used] = source.values[:, :, :used]

    def _ragged_layers(self) -> list[RaggedLayer]:
        return self.layers  # pyright: ignore[reportReturnType]  # only this class fills the list

    # What transformers asks of a cache during a forward pass.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(RaggedLayer())
        return self._ragged_layers()[layer_idx].update(key_states, value_states, self._append)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Position of the first query: a number if it is the same in all rows, else [B]."""
        assert self._append is not None
        return self._append.positions[:, 0] if self._append.start is None else self._append.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        assert self._append is not None
        return self._append.num_visible, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's, where they differ; what a captured pass is told stays true while it is replayed."""
        append = self._append
        return self.longest if append is None or append.start is not None else append.num_visible


def ragged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Additive mask [1 or B, 1, Q, KV] in `dtype`, 0 where `mask_function` lets a query see a slot and -inf elsewhere.

    None if causality says it all: one query that sees everything, or queries from the very first token on.
    """
    if attention_mask is not None or use_vmap:
        raise UsageError("model: expected plain causal attention; this one asks for a mask of its own")
    is_whole = q_length == 1 or kv_length == q_length
    is_local = local_size is not None and kv_length > local_size
    if allow_is_causal_skip and isinstance(q_offset, int) and is_whole and not is_local:
        return None
    queries = torch.arange(q_length, device=device)
    queries = queries[None] + (q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset)
    slots = torch.arange(kv_length, device=device) + kv_offset
    rows = torch.arange(queries.shape[0], device=device)
    is_seen = mask_function(
        rows[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device),
        queries[:, None, :, None],
        slots[None, None, None, :],
    )
    # Additive and not boolean: the fused kernels would convert a boolean one again in every layer.
    return torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, -torch.inf)


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of queries [B, H, Q, D] over [B, H / G, KV, D]; output [B, Q, H, D].

    The G query heads that share a key head are folded into the query axis, so that keys and values are read in place.
    Repeating them, or `enable_gqa` on CPU, makes a step with short Q several times slower.
    """
    if s_aux is not None or position_bias is not None:
        raise UsageError("model: expected attention without sinks and without a position bias; this one has them")
    num_rows, num_heads, num_queries, width = query.shape
    num_groups = num_heads // key.shape[1]
    if attention_mask is None and num_queries > 1:
        if softcap is None:
            output = functional.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=num_groups > 1
            )
            return output.transpose(1, 2), None
        causal = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).triu_(1)
        attention_mask = query.new_zeros(1, 1, num_queries, num_queries).masked_fill_(causal, -torch.inf)
    folded = query.reshape(num_rows, key.shape[1], num_groups * num_queries, width)
    mask = _fold_mask(attention_mask, num_groups)
    if softcap is None:
        output = functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
    else:
        output = _capped_attention(folded, key, value, mask, width**-0.5 if scaling is None else scaling, softcap)
    return output.reshape(num_rows, num_heads, num_queries, value.shape[3]).transpose(1, 2), None


def _fold_mask(mask: Tensor | None, num_groups: int) -> Tensor | None:
    """The mask [.., Q, KV] repeated to [.., G * Q, KV], made once per forward pass: it is the same in all layers."""
    if mask is None or num_groups == 1:
        return mask
    folded = getattr(mask, "folded", None)
    if folded is None or folded[0] != num_groups:
        folded = (num_groups, mask.repeat(1, 1, num_groups, 1))
        mask.folded = folded  # pyright: ignore[reportAttributeAccessIssue]
    return folded[1]


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """softmax(c tanh(q k^T s / c) + mask) v, as Gemma 2 has it; no fused kernel does this."""
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype) @ value


AttentionInterface.register(ATTENTION, ragged_attention)
AttentionMaskInterface.register(ATTENTION, ragged_mask)
