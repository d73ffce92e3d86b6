"""Sampling parameters: from logits to the probabilities that tokens are drawn from, for target and draft rows alike.

logits -> `penalise` (penalties, bias) -> `warp` (temperature, top-k, top-p, min-p, renormalisation) -> probabilities
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

TOP_P_TOLERANCE = 1e-6
"""A prefix reaches top_p if its mass is >= top_p minus this: above the rounding of a float32 softmax, so that float32
and float64 rows keep the same tokens when a prefix has exactly the mass asked for."""

MIN_P_TOLERANCE = 1e-6
"""A token is kept by min-p if its probability is >= min_p times the largest one, less this *relative* amount."""

SMALLEST_TEMPERATURE = 1e-30
"""Positive temperatures below this count as this, so that float32 logits divided by one stay finite."""

_NUM_LEADING = 512
"""On a CPU, filters look at this many leading tokens before they sort a whole row (13 times cheaper at V = 49,152)."""


@dataclass(frozen=True)
class Penalties:
    """Penalties, biases and token histories of B requests at the start of a step.

    Attributes:
        prompt_mask: [B, V] bool, tokens that occur in the prompt.
        output_counts: [B, V] int32, occurrences of each token in the output.
        repetition, frequency, presence: [B] float64, or None where no request uses the penalty.
        bias_rows, bias_ids, bias_values: [N] each, the entries of all logit biases; None where there is none.
    """

    prompt_mask: Tensor
    output_counts: Tensor
    repetition: Tensor | None = None
    frequency: Tensor | None = None
    presence: Tensor | None = None
    bias_rows: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None

    @staticmethod
    def of(
        params: Sequence[Any],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        keeps_histories: bool = False,
    ) -> Penalties | None:
        """Stack the penalties of B requests and count their tokens; None if no request uses a penalty or a bias.

        With `keeps_histories` tokens are counted in any case, for a drafter with a penalty of its own.

        `params` have the attributes `repetition_penalty`, `frequency_penalty`, `presence_penalty` and `logit_bias` (ids
        below `vocab_size`). Tokens outside the vocabulary have no logit and are not counted.
        """

        def column(name: str, off: float) -> Tensor | None:
            values = [getattr(p, name) for p in params]
            used = any(v != off for v in values)
            return torch.tensor(values, dtype=torch.float64, device=device) if used else None

        repetition = column("repetition_penalty", 1.0)
        frequency = column("frequency_penalty", 0.0)
        presence = column("presence_penalty", 0.0)
        biases = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
        if repetition is None and frequency is None and presence is None and not biases and not keeps_histories:
            return None
        rows, ids, values = zip(*biases, strict=True) if biases else (None, None, None)

        def count(histories: Sequence[Sequence[int]]) -> Tensor:
            return torch.stack([_count(tokens, vocab_size) for tokens in histories]).to(device)

        return Penalties(
            prompt_mask=count(prompts) > 0,
            output_counts=count(outputs),
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            bias_rows=torch.tensor(rows, device=device) if rows else None,
            bias_ids=torch.tensor(ids, device=device) if ids else None,
            bias_values=torch.tensor(values, dtype=torch.float64, device=device) if values else None,
        )

    def extend(self, emitted: Tensor) -> Penalties:
        """The penalties after the tokens `emitted` [B, N] (padded with -1) were added to the outputs."""
        ids, counted = _countable(emitted, self.output_counts.shape[-1])
        return replace(self, output_counts=self.output_counts.scatter_add(-1, ids, counted.to(torch.int32)))

    def repeat(self, times: int) -> Penalties:
        """The penalties of [B * C] rows, C = `times` equal ones for each request, one behind the other."""

        def repeated(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.repeat_interleave(times, 0)

        bias_rows = self.bias_rows
        if bias_rows is not None:
            bias_rows = (bias_rows[:, None] * times + torch.arange(times, device=bias_rows.device)).flatten()
        return Penalties(
            prompt_mask=self.prompt_mask.repeat_interleave(times, 0),
            output_counts=self.output_counts.repeat_interleave(times, 0),
            repetition=repeated(self.repetition),
            frequency=repeated(self.frequency),
            presence=repeated(self.presence),
            bias_rows=bias_rows,
            bias_ids=repeated(self.bias_ids),
            bias_values=repeated(self.bias_values),
        )


def _count(tokens: Sequence[int], vocab_size: int) -> Tensor:
    inside = [token for token in tokens if 0 <= token < vocab_size]
    return torch.bincount(torch.tensor(inside, dtype=torch.int64), minlength=vocab_size).to(torch.int32)


def _countable(tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """`tokens` with padding and foreign ids replaced by 0, and where they were none."""
    counted = (tokens >= 0) & (tokens < vocab_size)
    return torch.where(counted, tokens, 0), counted


def penalise(logits: Tensor, penalties: Penalties, appended: Tensor) -> Tensor:
    """Apply penalties and biases to `logits` [B, Q, V], in this order, n = output occurrences of a token:

        repetition  l > 0: l / r, else l * r   for tokens of prompt or output (Keskar et al., arXiv 1909.05858, 4.1)
        frequency   l - f * n
        presence    l - s * [n > 0]
        bias        l + b

    Row i follows the committed tokens and `appended[:, :A - Q + 1 + i]`, `appended` [B, A] with A >= Q - 1 being draft
    tokens behind the committed ones: they count as output, -1 is no token. float32, or float64 for float64 logits.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

    def column(values: Tensor) -> Tensor:
        return values.to(logits.dtype)[:, None, None]

    if penalties.repetition is not None or penalties.frequency is not None or penalties.presence is not None:
        counts = _counts_by_row(penalties.output_counts, appended, logits.shape[1])
        occurs = counts > 0
        if penalties.repetition is not None:
            seen = penalties.prompt_mask[:, None] | occurs
            r = column(penalties.repetition)
            logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
        if penalties.frequency is not None:
            logits = logits - column(penalties.frequency) * counts
        if penalties.presence is not None:
            logits = logits - column(penalties.presence) * occurs
    if penalties.bias_rows is not None and penalties.bias_ids is not None and penalties.bias_values is not None:
        values = penalties.bias_values.to(logits.dtype)[:, None].expand(-1, logits.shape[1])
        where = (penalties.bias_rows, penalties.bias_ids)
        logits = logits.transpose(1, 2).index_put(where, values, accumulate=True).transpose(1, 2)
    return logits


def _counts_by_row(counts: Tensor, appended: Tensor, num_rows: int) -> Tensor:
    """Output counts [B, Q, V]: the committed ones plus, in row i, those of `appended[:, :A - Q + 1 + i]`."""
    batch, num_appended = appended.shape
    ids, counted = _countable(appended, counts.shape[-1])
    column = torch.arange(num_appended, device=counts.device)
    row = torch.arange(num_rows, device=counts.device)[:, None]
    visible = counted[:, None] & (column < num_appended - num_rows + 1 + row)
    return (
        counts[:, None]
        .repeat(1, num_rows, 1)
        .scatter_add_(-1, ids[:, None].expand(batch, num_rows, num_appended), visible.to(counts.dtype))
    )


def warp(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *,
    is_greedy: bool | None = None,
) -> Tensor:
    """Probabilities [B, Q, V] of `logits` [B, Q, V] under each sequence's own sampling parameters [B].

        p = softmax(logits / T), cut to the top_k most probable tokens, of which to the smallest set of most probable
        ones whose share of the mass is >= top_p - `TOP_P_TOLERANCE`, of which to those with
        p >= min_p * max(p) * (1 - `MIN_P_TOLERANCE`), renormalised

    T = 0 is the one-hot row of the largest logit, the lowest id on ties. Tokens are ranked by logit, then by id, so
    top_k = 1 keeps exactly the token of T = 0. A filter is off in a row where top_k is 0, top_p is 1 or min_p is 0, and
    in all rows where it is None; such rows are the same to the last bit as if no other row had a filter.
    Computed and returned in float32, or float64 for float64 logits. -inf logits give 0. A row with NaN, +inf or no
    finite logit gives a row without meaning, which callers refuse, and leaves the others alone: NaN throughout where
    T > 0. `is_greedy` says that T = 0 in all rows (True) or in none (False), where that is known.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probs = _softmax(logits, temperature, is_greedy)
    if top_k is None and top_p is None and min_p is None:
        return probs

    def by_row(values: Tensor | None, off: float) -> Tensor:
        column = torch.full_like(temperature, off) if values is None else values
        return column.repeat_interleave(logits.shape[1])

    row_logits, row_probs = logits.flatten(0, 1), probs.flatten(0, 1)
    row_top_k, row_top_p, row_min_p = by_row(top_k, 0).to(torch.int64), by_row(top_p, 1.0), by_row(min_p, 0.0)
    # A product is faster than a masked fill on a CPU; NaN only spreads in rows that have no meaning anyway.
    kept = row_probs
    if top_k is not None or top_p is not None:
        kept = kept * _keep_most_probable(row_logits, row_probs, row_top_k, row_top_p)
    if min_p is not None:
        threshold = kept.amax(-1) * (row_min_p * (1 - MIN_P_TOLERANCE)).to(kept.dtype)
        kept = kept * (kept >= threshold[:, None])
    # Rows without a filter are divided by 1: their last bits must not depend on what the other rows ask for.
    is_filtered = (row_top_k > 0) | (row_top_p < 1) | (row_min_p > 0)
    kept.div_(torch.where(is_filtered, kept.sum(-1), 1)[:, None])
    return kept.unflatten(0, probs.shape[:2])


def _softmax(logits: Tensor, temperature: Tensor, is_greedy: bool | None) -> Tensor:
    """softmax(logits / T) by row; the one-hot row of the first largest logit where T = 0."""
    # Reading a condition back is cheap on a CPU and a synchronisation elsewhere, where all passes are made instead.
    if is_greedy is None and logits.device.type == "cpu":
        num_greedy = int((temperature == 0).sum())
        is_greedy = {0: False, len(temperature): True}.get(num_greedy)
    match is_greedy:
        case True:
            return torch.zeros_like(logits).scatter_(-1, _first_largest(logits), 1)
        case False:
            return torch.softmax(_divided(logits, temperature), -1)
        case None:
            return _softmax_of_mixed(logits, temperature)


def _softmax_of_mixed(logits: Tensor, temperature: Tensor) -> Tensor:
    # A greedy row is the softmax of a row whose winner stands out so far that all others underflow to exactly 0.
    is_greedy = temperature == 0
    scaled = _divided(logits, torch.where(is_greedy, 1, temperature))
    winner = _first_largest(logits)
    top = torch.where(is_greedy[:, None, None], torch.finfo(logits.dtype).max, scaled.gather(-1, winner))
    return torch.softmax(scaled.scatter_(-1, winner, top), -1)


def _divided(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits / temperature.clamp(min=SMALLEST_TEMPERATURE).to(logits.dtype)[:, None, None]


def _first_largest(logits: Tensor) -> Tensor:
    """The lowest id with the largest logit, [..., 1]: as torch.max, to which argmax refers, promises on ties."""
    return logits.argmax(-1, keepdim=True)


def _keep_most_probable(logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens [R, V] top-k followed by top-p keep in each row."""
    if logits.device.type != "cpu" or logits.shape[-1] <= 2 * _NUM_LEADING:
        return _keep_by_sorting(logits, probs, top_k, top_p)
    keep, is_settled = _keep_by_leading(logits, probs, top_k, top_p)
    open_rows = (~is_settled).nonzero().squeeze(-1)
    if len(open_rows):
        keep[open_rows] = _keep_by_sorting(logits[open_rows], probs[open_rows], top_k[open_rows], top_p[open_rows])
    return keep


def _keep_by_sorting(logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)  # stable: the lowest id first on ties
    mass = probs.gather(-1, ids).cumsum(-1, dtype=torch.float64)
    last = (_num_kept(mass, top_k, top_p, logits.shape[-1]) - 1)[:, None]
    smallest, last_id = ranked.gather(-1, last), ids.gather(-1, last)
    all_ids = torch.arange(logits.shape[-1], device=logits.device)
    return (logits > smallest) | ((logits == smallest) & (all_ids <= last_id))


def _keep_by_leading(logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """As `_keep_by_sorting` from the leading tokens alone, and [R] whether they settle the question."""
    vocab_size = logits.shape[-1]
    ranked, ids = logits.topk(_NUM_LEADING, dim=-1)
    mass = probs.gather(-1, ids).cumsum(-1, dtype=torch.float64)
    num_kept = _num_kept(mass, top_k, top_p, vocab_size)[:, None]
    first_dropped = num_kept.clamp(max=_NUM_LEADING - 1)
    smallest = ranked.gather(-1, first_dropped - 1)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    is_off = ~has_top_k & (top_p >= 1)
    # Open: the cut lies behind the leading tokens, or the mass that top-p refers to does, or a tie straddles the cut.
    is_settled = (
        (num_kept < _NUM_LEADING).squeeze(-1)
        & (~has_top_k | (top_k <= _NUM_LEADING))
        & (ranked.gather(-1, first_dropped) < smallest).squeeze(-1)
    )
    keep = logits >= smallest.masked_fill_(is_off[:, None], -torch.inf)
    return keep, is_settled | is_off


def _num_kept(mass: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> Tensor:
    """Number of tokens [R] that top-k followed by top-p keep, from the cumulated mass [R, N] of the N most probable.

    Without top-k the whole mass is 1. The answer means nothing if it exceeds N.
    """
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    num_top_k = torch.where(has_top_k, top_k, vocab_size)
    last = (num_top_k - 1).clamp(max=mass.shape[-1] - 1)
    total = torch.where(has_top_k, mass.gather(-1, last[:, None]).squeeze(-1), 1)
    num_short = (mass < ((top_p - TOP_P_TOLERANCE) * total)[:, None]).sum(-1)
    return torch.where(top_p < 1, torch.minimum(num_short + 1, num_top_k), num_top_k).clamp(max=vocab_size)
