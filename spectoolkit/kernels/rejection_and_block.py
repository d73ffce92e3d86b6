"""Rejection and block verification from logits: no probabilities are written, and each row is read at most twice.

Of a step with target logits [B, K+1, V] a first pass reads every row that belongs to a token, and leaves a largest
logit and a sum of exponentials per chunk. From these a program per sequence has p(x) and q(x) of the drafted tokens,
and so the accepted prefix. Where a residual (p - q)+ is drawn from, a second pass sums it chunk by chunk (all K rows
for block verification, one row otherwise). The token is found in one more chunk, read again.

Arithmetic. Logits are divided by T in float32 and exponentials are float32, on a GPU its fast ones, whose relative
error grows with the distance from the row's largest logit, by some 1e-7 of it. Sums within a chunk are float32; sums
over chunks, p(x), q(x), thresholds and the inversion of the distribution function are float64. Products and differences
are not fused, so that a residual is the same number where it is summed and where it is drawn from. A verdict is that of
the reference but where a uniform lies within the rounding of a threshold.
"""

# What a launch takes beside a kernel's parameters, and what a kernel's own types are, is not in triton's annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectoolkit.datatypes import Dense, PointMass, Uniforms, Verdict
from spectoolkit.kernels.launch import Cut, on_device_of, padded, with_dense_rows
from spectoolkit.kernels.rows import (
    below,
    chunk_masses,
    combine_parts,
    divisor,
    first_above,
    inverse_of,
    is_fine,
    load_logits,
    prob_at,
    probs_of_chunk,
    store_parts,
)
from spectoolkit.kernels.verdict import int32, verdict_buffers

_POINT, _DENSE, _LOGITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """The draft law of tokens drawn from softmax(logits / T), the one-hot row of the first largest logit where T = 0.

    Attributes:
        logits: [B, K, V'] float32, float16 or bfloat16; ids behind the target's V are cut off, missing ones have no
            probability.
        temperature: [B] float64.
    """

    logits: Tensor
    temperature: Tensor


@triton.jit
def _row_parts(
    logits, temperature, lengths, max_ptr, sum_ptr, arg_ptr,
    num_rows, num_more, width, stride_b, stride_q, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Of row i of a sequence, where i < length + num_more."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    b, i = row // num_rows, row % num_rows
    if i < tl.load(lengths + b) + num_more:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        start = logits + b.to(tl.int64) * stride_b + i.to(tl.int64) * stride_q
        x = tl.div_rn(load_logits(start, tokens, width), divisor(tl.load(temperature + b)))
        store_parts(x, tokens, row.to(tl.int64) * num_chunks + chunk, max_ptr, sum_ptr, arg_ptr)


@triton.jit
def _decide(
    logits, temperature, tokens, lengths, accept, draft, draft_temperature,
    max_ptr, sum_ptr, arg_ptr, draft_max, draft_sum, draft_arg,
    top_ptr, total_ptr, first_ptr, draft_top, draft_total, draft_first,
    joint_ptr, prob_ptr, judged, accepted, status_ptr,
    num_drafts, vocab_size, width, stride_b, stride_q, draft_stride_b, draft_stride_q, num_chunks,
    DRAFT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Per sequence: what its chunks say of every row, the tests of rejection, and block verification's joint ratios."""
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + b)
    t = tl.load(temperature + b)
    if DRAFT == _LOGITS:
        draft_t = tl.load(draft_temperature + b)
    num_accepted = length * 0
    alive = length >= 0
    joint = (length * 0 + 1).to(tl.float64)
    status = (length * 0).to(tl.int32)
    tl.store(joint_ptr + b * (num_drafts + 1), joint)
    for i in range(0, num_drafts + 1):
        row = b * (num_drafts + 1) + i
        drafted = i < length
        if i <= length:
            top, total, first = combine_parts(max_ptr, sum_ptr, arg_ptr, row, num_chunks, CHUNKS)
            tl.store(top_ptr + row, top)
            tl.store(total_ptr + row, total)
            tl.store(first_ptr + row, first)
            status |= tl.where(is_fine(top), 0, 1)
            if drafted:
                at = b * num_drafts + i
                token = tl.load(tokens + at)
                p = prob_at(logits + b * stride_b + i * stride_q, token, vocab_size, t, top, total, first)
                if DRAFT == _POINT:
                    q = (token >= 0).to(tl.float64)
                elif DRAFT == _DENSE:
                    inside = (token >= 0) & (token < width)
                    start = draft + b * draft_stride_b + i * draft_stride_q
                    q = tl.load(start + token, mask=inside, other=0.0).to(tl.float64)
                else:
                    q_top, q_total, q_first = combine_parts(draft_max, draft_sum, draft_arg, at, num_chunks, CHUNKS)
                    tl.store(draft_top + at, q_top)
                    tl.store(draft_total + at, q_total)
                    tl.store(draft_first + at, q_first)
                    status |= tl.where(is_fine(q_top), 0, 4)
                    start = draft + b * draft_stride_b + i * draft_stride_q
                    q = prob_at(start, token, width, draft_t, q_top, q_total, q_first)
                status |= tl.where(q > 0, 0, 2)
                passed = tl.load(accept + at) * q < p
                alive = alive & passed
                num_accepted += alive.to(tl.int64)
                joint = tl.minimum(joint * p / tl.where(q > 0, q, 1.0), 1.0)
                tl.store(joint_ptr + row + 1, joint)
                tl.store(prob_ptr + at, p)
                tl.store(judged + at, passed.to(tl.int8))
    tl.store(accepted + b, num_accepted)
    tl.store(status_ptr + b, status)


@triton.jit
def _draft_probs(
    draft, tokens, width, draft_t, draft_top, draft_total, draft_first, at,
    DRAFT: tl.constexpr,
):  # fmt: skip
    """float32 draft probabilities of a chunk of row `at` of all sequences, `draft` pointing to its first number."""
    if DRAFT == _DENSE:
        probs = tl.load(draft + tokens, mask=tokens < width, other=0.0)
    else:
        x = tl.div_rn(load_logits(draft, tokens, width), divisor(draft_t))
        top, inverse = tl.load(draft_top + at), inverse_of(tl.load(draft_total + at))
        probs = probs_of_chunk(x, tokens, draft_t, top, inverse, tl.load(draft_first + at))
    return probs


@triton.jit
def _residual_masses(
    logits, temperature, lengths, accepted, draft, draft_temperature,
    top_ptr, total_ptr, first_ptr, draft_top, draft_total, draft_first, joint_ptr, mass_ptr,
    num_drafts, vocab_size, width, stride_b, stride_q, draft_stride_b, draft_stride_q, num_chunks, num_rows,
    DRAFT: tl.constexpr, IS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk of (pi_n p - q)+: of all rows n that have a draft, or with pi = 1 of the first rejected one."""
    pair, chunk = tl.program_id(0), tl.program_id(1)
    b = (pair // num_rows).to(tl.int64)
    n = (pair % num_rows).to(tl.int64) if IS_BLOCK else tl.load(accepted + b)
    if n < tl.load(lengths + b):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        t, row, at = tl.load(temperature + b), b * (num_drafts + 1) + n, b * num_drafts + n
        x = tl.div_rn(load_logits(logits + b * stride_b + n * stride_q, tokens, vocab_size), divisor(t))
        top, inverse = tl.load(top_ptr + row), inverse_of(tl.load(total_ptr + row))
        p = probs_of_chunk(x, tokens, t, top, inverse, tl.load(first_ptr + row))
        if IS_BLOCK:
            p = p * tl.load(joint_ptr + row).to(tl.float32)
        draft_t = tl.load(draft_temperature + b)
        start = draft + b * draft_stride_b + n * draft_stride_q
        q = _draft_probs(start, tokens, width, draft_t, draft_top, draft_total, draft_first, at, DRAFT)
        tl.store(mass_ptr + pair.to(tl.int64) * num_chunks + chunk, tl.sum(tl.maximum(p - q, 0.0), axis=0))


@triton.jit
def _longest_prefix(
    lengths, accept, joint_ptr, prob_ptr, mass_ptr, accepted, num_drafts, num_chunks,
    DRAFT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Block verification: the longest prefix of i tokens with u_i < h_i."""
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + b)
    chunk = tl.arange(0, CHUNKS)
    best = length * 0
    for i in range(1, num_drafts + 1):
        if i <= length:
            pi = tl.load(joint_ptr + b * (num_drafts + 1) + i)
            has_next = i < length
            if DRAFT == _POINT:
                p = tl.load(prob_ptr + b * num_drafts + i, mask=has_next, other=0.0)
                mass = tl.maximum(pi - tl.minimum(pi * p, 1.0), 0.0)
            else:
                at = (b * num_drafts + i) * num_chunks + chunk
                parts = tl.load(mass_ptr + at, mask=(chunk < num_chunks) & has_next, other=0.0)
                mass = tl.sum(parts.to(tl.float64), axis=0)
            threshold = tl.where(pi < 1, mass / tl.where(pi < 1, mass + 1 - pi, 1.0), 1.0)
            threshold = tl.where(has_next, threshold, pi)
            best = tl.where(tl.load(accept + b * num_drafts + i - 1) < threshold, i, best).to(tl.int64)
    tl.store(accepted + b, best)


@triton.jit
def _pick(
    logits, temperature, tokens_ptr, lengths, accepted, emit, draft, draft_temperature,
    max_ptr, sum_ptr, top_ptr, total_ptr, first_ptr, draft_top, draft_total, draft_first, joint_ptr, mass_ptr, emitted,
    num_drafts, vocab_size, width, stride_b, stride_q, draft_stride_b, draft_stride_q, num_chunks,
    DRAFT: tl.constexpr, IS_BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Draw the token behind the accepted prefix, from p or from what is left of it, and write the emitted block."""
    b = tl.program_id(0).to(tl.int64)
    n, length = tl.load(accepted + b), tl.load(lengths + b)
    t, row, at = tl.load(temperature + b), b * (num_drafts + 1) + n, b * num_drafts + n
    start = logits + b * stride_b + n * stride_q
    top = tl.load(top_ptr + row)

    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    tops = tl.load(max_ptr + row * num_chunks + chunk, mask=inside, other=-float("inf"))
    sums = tl.load(sum_ptr + row * num_chunks + chunk, mask=inside, other=0.0)
    masses = chunk_masses(tops, sums, top)  # of p, up to its normaliser
    if DRAFT == _POINT:
        drafted = tl.load(tokens_ptr + at, mask=n < num_drafts, other=-1)
        takes = (drafted >= 0) & (drafted < vocab_size) & (n < length)
        changed = tl.where(takes, drafted // CHUNK, 0)
        tokens = changed * CHUNK + tl.arange(0, CHUNK)
        x = tl.div_rn(load_logits(start, tokens, vocab_size), divisor(t))
        weights = tl.where(tokens == drafted, 0.0, tl.exp(below(x, top)))
        rest = tl.where(takes & (chunk == changed), tl.sum(weights, axis=0).to(tl.float64), masses)
    else:
        of_row = at if IS_BLOCK else b
        rest = tl.load(mass_ptr + of_row * num_chunks + chunk, mask=inside & (n < length), other=0.0).to(tl.float64)
    # Where rounding leaves nothing, the token comes from p, as `acceptance.residual` has it.
    uses_rest = (n < length) & (tl.sum(rest, axis=0) > 0)
    masses = tl.where(uses_rest, rest, masses)

    goal = tl.load(emit + row) * tl.sum(masses, axis=0)
    found = first_above(tl.cumsum(masses, axis=0), goal, masses, chunk, CHUNKS)
    before = tl.sum(tl.where(chunk < found, masses, 0.0), axis=0)
    offset = tl.arange(0, CHUNK)
    tokens = found * CHUNK + offset
    x = tl.div_rn(load_logits(start, tokens, vocab_size), divisor(t))
    weights = tl.exp(below(x, top))
    if DRAFT == _POINT:
        weights = tl.where(uses_rest & (tokens == drafted), 0.0, weights)
    else:
        p = weights * inverse_of(tl.load(total_ptr + row))
        if IS_BLOCK:
            p = p * tl.load(joint_ptr + row).to(tl.float32)
        if uses_rest:
            draft_t = tl.load(draft_temperature + b)
            begin = draft + b * draft_stride_b + n * draft_stride_q
            q = _draft_probs(begin, tokens, width, draft_t, draft_top, draft_total, draft_first, at, DRAFT)
            weights = tl.maximum(p - q, 0.0)
    weights = weights.to(tl.float64)
    last = found * CHUNK + first_above(tl.cumsum(weights, axis=0), goal - before, weights, offset, CHUNK)
    last = tl.where(t == 0, tl.load(first_ptr + row), last)
    last = tl.minimum(tl.maximum(last, 0), vocab_size - 1).to(tl.int64)

    position = tl.arange(0, POSITIONS)
    prefix = tl.load(tokens_ptr + b * num_drafts + position, mask=position < n, other=-1)
    block = tl.where(position == n, last, prefix)
    tl.store(emitted + b * (num_drafts + 1) + position, block, mask=position <= num_drafts)


def rejection(
    target_logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    draft: PointMass | Dense | DraftLogits,
    uniforms: Uniforms,
    chunk: int | None = None,
) -> tuple[Verdict, Tensor]:
    """`verifiers.Rejection` of target logits [B, K+1, V] at the temperatures T [B] (float64).

    Args:
        target_logits: float32, float16 or bfloat16; rows behind a proposal's end are not read.
        tokens, lengths: of the proposal, [B, K] and [B] int64.
        draft: what the tokens were drawn from, a `Dense` law in float32.
        uniforms: as for the verifier.
        chunk: tokens per program, a power of two; None is `launch.chunk_size`.

    Returns:
        The verdict, and the status [B] of every sequence, 0 or some of `verdict.INVALID_TARGET`,
        `NOT_DRAWN` and `INVALID_DRAFT`: there the verdict means nothing.
    """
    return _judge(target_logits, temperature, tokens, lengths, draft, uniforms, chunk, is_block=False)


def block(
    target_logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    draft: PointMass | Dense | DraftLogits,
    uniforms: Uniforms,
    chunk: int | None = None,
) -> tuple[Verdict, Tensor]:
    """`verifiers.Block`, arguments and result as for `rejection`."""
    return _judge(target_logits, temperature, tokens, lengths, draft, uniforms, chunk, is_block=True)


def _judge(
    target_logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    draft: PointMass | Dense | DraftLogits,
    uniforms: Uniforms,
    chunk: int | None,
    *,
    is_block: bool,
) -> tuple[Verdict, Tensor]:
    logits = with_dense_rows(target_logits)
    size, num_rows, vocab_size = logits.shape
    num_drafts = num_rows - 1
    cut = Cut.of(vocab_size, chunk)
    num = cut.num_chunks
    temperature = temperature.to(torch.float64).contiguous()
    tokens, lengths = tokens.to(torch.int64).contiguous(), lengths.to(torch.int64).contiguous()
    accept, emit = uniforms.accept.to(torch.float64).contiguous(), uniforms.emit.to(torch.float64).contiguous()

    kind, rows, draft_temperature = 0, logits, temperature
    match draft:
        case Dense(probs):
            kind, rows = 1, with_dense_rows(probs)
        case DraftLogits(draft_logits, of_draft):
            kind, rows = 2, with_dense_rows(draft_logits)
            draft_temperature = of_draft.to(torch.float64).contiguous()
        case PointMass():
            pass
    width = min(rows.shape[-1], vocab_size)

    parts = _parts_buffers(logits, size * num_rows, num)
    consts = _row_buffers(logits, size * num_rows)
    draft_parts = _parts_buffers(logits, size * num_drafts if kind == 2 else 0, num)
    draft_consts = _row_buffers(logits, size * num_drafts if kind == 2 else 0)
    joint = logits.new_empty((size, num_rows), dtype=torch.float64)
    prob = logits.new_empty((size, num_drafts), dtype=torch.float64)
    mass_rows = 0 if kind == 0 else num_drafts if is_block else 1
    mass = logits.new_empty((size * mass_rows, num), dtype=torch.float32)
    emitted, judged, accepted, status = verdict_buffers(logits)
    strides = (logits.stride(0), logits.stride(1), rows.stride(0), rows.stride(1))
    sizes = (num_drafts, vocab_size, width, *strides, num)
    with on_device_of(logits):
        _row_parts[(size * num_rows, num)](
            logits, temperature, lengths, *parts, num_rows, 1, vocab_size, *strides[:2], num,
            CHUNK=cut.chunk, num_warps=cut.num_warps,
        )  # fmt: skip
        if kind == 2:
            _row_parts[(size * num_drafts, num)](
                rows, draft_temperature, lengths, *draft_parts, num_drafts, 0, width, *strides[2:], num,
                CHUNK=cut.chunk, num_warps=cut.num_warps,
            )  # fmt: skip
        _decide[(size,)](
            logits, temperature, tokens, lengths, accept, rows, draft_temperature, *parts, *draft_parts, *consts,
            *draft_consts, joint, prob, judged, accepted, status, *sizes,
            DRAFT=kind, CHUNKS=cut.padded, num_warps=1,
        )  # fmt: skip
        if mass_rows:
            _residual_masses[(size * mass_rows, num)](
                logits, temperature, lengths, accepted, rows, draft_temperature, *consts, *draft_consts, joint, mass,
                *sizes, mass_rows,
                DRAFT=kind, IS_BLOCK=is_block, CHUNK=cut.chunk, num_warps=cut.num_warps, enable_fp_fusion=False,
            )  # fmt: skip
        if is_block:
            _longest_prefix[(size,)](
                lengths, accept, joint, prob, mass, accepted, num_drafts, num,
                DRAFT=kind, CHUNKS=cut.padded, num_warps=1,
            )  # fmt: skip
        _pick[(size,)](
            logits, temperature, tokens, lengths, accepted, emit, rows, draft_temperature, *parts[:2], *consts,
            *draft_consts, joint, mass, emitted, *sizes,
            DRAFT=kind, IS_BLOCK=is_block, CHUNK=cut.chunk, CHUNKS=cut.padded, POSITIONS=padded(num_rows),
            num_warps=cut.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return Verdict(accepted, emitted, judged.to(torch.bool)), status


def _parts_buffers(like: Tensor, num_rows: int, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row and chunk: largest logit, sum of exponentials, id of the largest."""
    top = like.new_empty((num_rows, num), dtype=torch.float32)
    return top, torch.empty_like(top), int32(like, num_rows, num)


def _row_buffers(like: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: largest logit, sum of exponentials, id of the largest."""
    total = like.new_empty((num_rows,), dtype=torch.float64)
    return like.new_empty((num_rows,), dtype=torch.float32), total, int32(like, num_rows)
