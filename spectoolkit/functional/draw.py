"""Drawing tokens by inversion, from noise that the caller brings."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from spectoolkit.functional.noise import exponentials

_CHUNK = 256

_BELOW = torch.tensor(-torch.inf, dtype=torch.float64)

_NUM_TOGETHER = {"cpu": 1 << 17}
"""Numbers of shared noise made at once: what stays in a processor's cache, elsewhere what launches few kernels."""


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [...] int64 of `probs` [..., V] at `uniforms` [...] in [0, 1): inverse CDF, in float64.

        id = first x with F(x) > u * F(V - 1),   F(x) = probs[0] + .. + probs[x]

    `probs` are weights >= 0; they need not sum to 1. The id always has positive weight, at u = 0 and at the largest u
    below 1 as well. A row without positive weight, or with NaN, gives some id below V and leaves the others alone.
    """
    vocab_size = probs.shape[-1]
    if vocab_size <= _CHUNK:
        cumulated = probs.contiguous().cumsum(-1, dtype=torch.float64)
        # u <= 1 - 2^-53, so that u F is below F when it is rounded, but where F is denormal in float64.
        goal = uniforms * cumulated[..., -1]
        return _first_above(cumulated, goal, probs, may_exceed=probs.dtype == torch.float64)
    # Two levels, because a float64 running sum over a whole vocabulary costs tens of times more than sums of chunks.
    width = min(_CHUNK, vocab_size)
    num_whole = vocab_size // width
    whole = probs[..., : num_whole * width].unflatten(-1, (num_whole, width))
    rest = probs[..., num_whole * width :]
    masses = torch.cat(
        [whole.sum(-1, dtype=torch.float64), rest.sum(-1, keepdim=True, dtype=torch.float64)],
        dim=-1,
    )
    cumulated = masses.cumsum(-1)
    goal = uniforms.to(torch.float64) * cumulated[..., -1]
    chunk = _first_above(cumulated, goal, masses, may_exceed=True)
    before = torch.nn.functional.pad(cumulated, (1, 0)).gather(-1, chunk[..., None])
    ids = chunk[..., None] * width + torch.arange(width, device=probs.device)
    weights = probs.gather(-1, ids.clamp(max=vocab_size - 1)).to(torch.float64).masked_fill(ids >= vocab_size, 0)
    # A chunk's running sum may end, by rounding, below the sum of the chunk that chose it.
    offset = _first_above(weights.cumsum(-1), goal - before.squeeze(-1), weights, may_exceed=True)
    return (chunk * width + offset).clamp(max=vocab_size - 1)


def gumbel_max(probs: Tensor, keys: Tensor) -> Tensor:
    """Token ids [...] int64 of `probs` [..., V] with the shared noise of `keys` [...] int64: the Gumbel-max trick.

        id = argmax_x (log p(x) + G_x) = argmax_x p(x) / E_x,   E = exp(-G) standard exponentials

    Two rows with the same key give the same id with probability `acceptance.coupled_overlap`, more the closer they are.
    `probs` are weights >= 0; the id always has positive weight, and is the only such one of a one-hot row. Keys that
    are no tensors may say themselves how they are drawn with (`torch.overrides`); `exactness` integrates over them so.
    """
    if has_torch_function_unary(keys):
        return handle_torch_function(gumbel_max, (keys,), probs, keys)
    vocab_size = probs.shape[-1]
    rows, row_keys = probs.reshape(-1, vocab_size), keys.reshape(-1)
    num_rows = max(1, _NUM_TOGETHER.get(probs.device.type, 1 << 26) // vocab_size)
    parts = zip(rows.split(num_rows), row_keys.split(num_rows), strict=True)
    return torch.cat([(part / exponentials(key, vocab_size)).argmax(-1) for part, key in parts]).view(keys.shape)


def _first_above(cumulated: Tensor, goal: Tensor, weights: Tensor, *, may_exceed: bool) -> Tensor:
    """First index with `cumulated > goal` and positive weight; the last one with positive weight if there is none.

    `may_exceed`: whether a goal may lie at or behind the end of its sum, so that there is none.

    Asking for positive weight is not redundant: a parallel running sum need not be monotonic. One on a CPU is, so that
    a search finds the same index, in a tenth of the operations.
    """
    size = weights.shape[-1]
    if cumulated.is_cpu and not has_torch_function_unary(goal):
        if may_exceed:
            goal = torch.minimum(goal, cumulated[..., -1].nextafter(_BELOW))
        found = torch.searchsorted(cumulated, goal[..., None].contiguous(), right=True).squeeze(-1)
        return found.clamp_(max=size - 1)  # NaN is behind everything
    index = torch.arange(size, device=weights.device)
    is_positive = weights > 0
    first = torch.where(is_positive & (cumulated > goal[..., None]), index, size).amin(-1)
    last_positive = torch.where(is_positive, index, 0).amax(-1)
    return torch.where(first < size, first, last_positive)
