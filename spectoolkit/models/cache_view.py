"""Sequences that read the rows of a ragged cache without having a row of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spectoolkit.models.ragged_cache import RaggedCache, RaggedLayer, aligned


class CacheView(RaggedCache):
    """N sequences over the B rows of `cache`, for one forward pass of Q new tokens each.

    New keys and values go into the slots of the row that a sequence reads, before any sequence attends: so sequences
    that hold one token of a row each see the tokens before theirs. The lengths of the cache do not change.

    Args:
        cache: the cache.
        rows: [N] the row that each sequence reads.
        positions: [N, Q] of the new tokens in their rows.
        num_tokens: no position lies further than this behind the end of its row.
    """

    def __init__(self, cache: RaggedCache, rows: Tensor, positions: Tensor, num_tokens: int) -> None:
        super().__init__(len(cache.lengths), cache.lengths.device)
        self.layers = cache.layers  # shared: layers that are made here are the cache's
        self._rows, self._positions = rows, positions
        self._num_visible = aligned(cache.longest + num_tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            layer, shape = RaggedLayer(), (len(self.lengths), -1, -1, -1)
            layer.lazy_initialization(key_states[:1].expand(shape), value_states[:1].expand(shape))
            self.layers.append(layer)
        layer = self._ragged_layers()[layer_idx]
        layer.reserve(self._num_visible)
        seen = []
        for buffer, states in ((layer.keys, key_states), (layer.values, value_states)):
            buffer[self._rows[:, None], :, self._positions] = states.transpose(1, 2)
            seen.append(buffer[:, :, : self._num_visible].index_select(0, self._rows))
        return seen[0], seen[1]

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        return self._positions[:, 0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._num_visible, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_visible
