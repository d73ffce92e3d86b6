"""What a replay needs of a target row and a draft row at many draft temperatures, from two reads of both.

The first read leaves largest logits and sums of exponentials: p(x), q(x) at every draft temperature, and both argmaxes.
Sums of min(p, q) and of max(p, q p(x) / q(x)) need the normalisers before they can begin, so they take a second read,
which is made only where they are asked for. Arithmetic as in `rejection_and_block`.
"""

# What a launch takes beside a kernel's parameters, and what a kernel's own types are, is not in triton's annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectoolkit.functional.warp import SMALLEST_TEMPERATURE
from spectoolkit.kernels.launch import chunk_size, num_chunks, num_warps, on_device_of, with_dense_rows
from spectoolkit.kernels.rows import NO_INDEX, divisor, exp_sum, load_logits, probs_of_chunk, store_parts


@dataclass(frozen=True, slots=True)
class Reduced:
    """Of R rows and S draft temperatures; x is the row's token, and -1 or an id behind a row's end has probability 0.

    Attributes:
        target_argmax, draft_argmax: [R] the lowest id with the largest logit.
        target_logsumexp, draft_logsumexp: [R], [R, S] float64 of logits / T (of the logits themselves where T = 0).
        target_prob, draft_prob: [R], [R, S] float64, p(x) and q(x), rounded to float32 as in the reference's rows; of
            one-hot rows where T = 0.
        target_log_prob: [R] float64, log p(x), not rounded before.
        overlap: [R, S] float64, sum of min(p, q); None where not asked for.
        coupled: [R, S] float64, as `functional.conditional.given_coupled`; None where not asked for.
        is_valid: [R, S] whether both rows give a distribution; where not, the other numbers mean nothing.
    """

    target_argmax: Tensor
    draft_argmax: Tensor
    target_logsumexp: Tensor
    draft_logsumexp: Tensor
    target_prob: Tensor
    draft_prob: Tensor
    target_log_prob: Tensor
    overlap: Tensor | None
    coupled: Tensor | None
    is_valid: Tensor


@triton.jit
def _pair_parts(
    target, draft, target_t, draft_t, max_ptr, sum_ptr, arg_ptr, draft_max, draft_sum, draft_arg,
    num_temperatures, vocab_size, width, target_stride, draft_stride, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of both rows: largest logits and sums of exponentials, the draft's at each of its temperatures."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.div_rn(load_logits(target + row * target_stride, tokens, vocab_size), divisor(tl.load(target_t + row)))
    store_parts(x, tokens, row * num_chunks + chunk, max_ptr, sum_ptr, arg_ptr)
    raw = load_logits(draft + row * draft_stride, tokens, width)
    raw_top = tl.max(raw, axis=0)
    tl.store(draft_arg + row * num_chunks + chunk, tl.min(tl.where(raw == raw_top, tokens, NO_INDEX), axis=0))
    for s in range(0, num_temperatures):
        at = row * num_temperatures + s
        t = divisor(tl.load(draft_t + at))
        top = tl.div_rn(raw_top, t)  # division keeps the order, so this is the largest of them
        tl.store(draft_max + at * num_chunks + chunk, top)
        tl.store(draft_sum + at * num_chunks + chunk, exp_sum(tl.div_rn(raw, t), top))


@triton.jit
def _pair_sums(
    target, draft, target_t, draft_t, top_ptr, inverse_ptr, arg_ptr, draft_top, draft_inverse, draft_arg, scale_ptr,
    min_ptr, max_ptr, num_temperatures, vocab_size, width, target_stride, draft_stride, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk's sums of min(p, q) and of max(p, s q) at each draft temperature."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    t = tl.load(target_t + row)
    x = tl.div_rn(load_logits(target + row * target_stride, tokens, vocab_size), divisor(t))
    p = probs_of_chunk(x, tokens, t, tl.load(top_ptr + row), tl.load(inverse_ptr + row), tl.load(arg_ptr + row))
    raw = load_logits(draft + row * draft_stride, tokens, width)
    first = tl.load(draft_arg + row)
    for s in range(0, num_temperatures):
        at = row * num_temperatures + s
        t = tl.load(draft_t + at)
        x = tl.div_rn(raw, divisor(t))
        q = probs_of_chunk(x, tokens, t, tl.load(draft_top + at), tl.load(draft_inverse + at), first)
        tl.store(min_ptr + at * num_chunks + chunk, tl.sum(tl.minimum(p, q), axis=0))
        tl.store(max_ptr + at * num_chunks + chunk, tl.sum(tl.maximum(p, q * tl.load(scale_ptr + at)), axis=0))


def reduce_rows(
    target_logits: Tensor,
    target_temperature: Tensor,
    draft_logits: Tensor,
    draft_temperatures: Tensor,
    tokens: Tensor,
    *,
    sums: bool = True,
    chunk: int | None = None,
) -> Reduced:
    """Reduce target logits [R, V] and draft logits [R, V'] at the tokens [R].

    Args:
        target_temperature, draft_temperatures: [R] and [R, S] float64, each >= 0.
        sums: whether `overlap` and `coupled` are asked for.
        chunk: tokens per program, a power of two; None is `launch.chunk_size`.
    """
    target, draft = with_dense_rows(target_logits), with_dense_rows(draft_logits)
    (num_rows, vocab_size), num_temperatures = target.shape, draft_temperatures.shape[1]
    width = min(draft.shape[-1], vocab_size)
    chunk = chunk or chunk_size(vocab_size)
    num = num_chunks(vocab_size, chunk)
    target_t = target_temperature.to(torch.float64).contiguous()
    draft_t = draft_temperatures.to(torch.float64).contiguous()
    options = {"CHUNK": chunk, "num_warps": num_warps(chunk)}
    sizes = (num_temperatures, vocab_size, width, target.stride(0), draft.stride(0), num)

    tops, draft_tops = _floats(target, num_rows, num), _floats(target, num_rows, num_temperatures, num)
    exps, draft_exps = torch.empty_like(tops), torch.empty_like(draft_tops)
    args, draft_args = (torch.empty_like(tops, dtype=torch.int32) for _ in range(2))
    with on_device_of(target):
        _pair_parts[(num_rows, num)](
            target, draft, target_t, draft_t, tops, exps, args, draft_tops, draft_exps, draft_args, *sizes, **options
        )  # fmt: skip
    top, total = _combined(tops, exps)
    draft_top, draft_total = _combined(draft_tops, draft_exps)
    target_argmax, draft_argmax = _first_of(tops, args, top), _first_of_draft(draft, draft_args, width)
    is_valid = (top.isfinite() & total.isfinite())[:, None] & draft_top.isfinite() & draft_total.isfinite()
    log_p = _log_prob(_gathered(target, tokens, vocab_size)[:, None], target_t[:, None], top[:, None], total[:, None])
    log_p = torch.where(target_t == 0, (tokens == target_argmax).to(log_p.dtype).log(), log_p[:, 0])
    log_q = _log_prob(_gathered(draft, tokens, width)[:, None], draft_t, draft_top, draft_total)
    log_q = torch.where(draft_t == 0, (tokens == draft_argmax).to(log_q.dtype).log()[:, None], log_q)
    p, q = (log.exp().float().double() for log in (log_p, log_q))

    overlap = coupled = None
    if sums:
        shared, wide = torch.empty_like(draft_tops), torch.empty_like(draft_tops)
        scale = torch.where(q > 0, p[:, None] / q, 0)
        with on_device_of(target):
            _pair_sums[(num_rows, num)](
                target, draft, target_t, draft_t, top.float(), _inverse(total), target_argmax,
                draft_top.float(), _inverse(draft_total), draft_argmax, scale.float(), shared, wide,
                *sizes, **options,
            )  # fmt: skip
        overlap = shared.sum(-1, dtype=torch.float64)
        accepted = 1 / wide.sum(-1, dtype=torch.float64)
        coupled = torch.where((q > 0) & (p > 0)[:, None], accepted, q)
    return Reduced(
        target_argmax=target_argmax,
        draft_argmax=draft_argmax,
        target_logsumexp=top + total.log(),
        draft_logsumexp=draft_top + draft_total.log(),
        target_prob=p,
        draft_prob=q,
        target_log_prob=log_p,
        overlap=overlap,
        coupled=coupled,
        is_valid=is_valid,
    )


def _floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _combined(tops: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit and sum of exp(x - largest), float64, of all chunks [..., C]."""
    tops = tops.to(torch.float64)
    top = tops.amax(-1)
    weight = torch.where(sums > 0, torch.exp(tops - top[..., None]), 0)
    return top, (sums * weight).sum(-1)


def _first_of(tops: Tensor, args: Tensor, top: Tensor) -> Tensor:
    """The lowest id [R] of the chunks whose largest logit is the row's."""
    return torch.where(tops == top[:, None], args, torch.iinfo(args.dtype).max).amin(-1)


def _first_of_draft(draft: Tensor, args: Tensor, width: int) -> Tensor:
    """The lowest id [R] with the largest logit, from that of each chunk: ids rise with the chunks."""
    found = draft.gather(-1, args.clamp(0, width - 1).long()).float()
    found = torch.where(args < width, found, -torch.inf)
    return args.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)


def _gathered(logits: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Logits [R] float32 of the tokens [R], -inf for ids outside the row."""
    index = tokens.clamp(0, width - 1)
    found = logits.gather(-1, index[:, None]).squeeze(-1).float()
    return torch.where(tokens == index, found, -torch.inf)


def _log_prob(logits: Tensor, temperature: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """Log-probability in float64 of tokens with these logits, divided by T in float32."""
    divisor = torch.where(temperature == 0, 1, temperature.clamp(min=SMALLEST_TEMPERATURE)).float()
    return (logits / divisor).double() - top - total.log()


def _inverse(total: Tensor) -> Tensor:
    """1 / total in float32; 0 where the row has no meaning."""
    return torch.where(total > 0, 1 / total, 0).float()
