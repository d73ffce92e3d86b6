"""What kernels do with a row of logits: a chunk's largest logit and sum of exponentials, and the row's from them.

A row that may not be (NaN, +inf, no finite entry, overflow by its temperature) has a largest logit that is not finite;
NaN counts as +inf, so that no arithmetic with it takes place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spectoolkit.functional.warp import SMALLEST_TEMPERATURE

NO_INDEX = tl.constexpr(2**31 - 1)
SMALLEST_T = tl.constexpr(SMALLEST_TEMPERATURE)

NEGLIGIBLE = tl.constexpr(70.0)
"""Chunks whose largest weight is below exp(-70) times the row's count as empty: float32 weights relative to the row's
largest are then positive wherever a chunk is not empty, also where a device flushes subnormal numbers."""


@triton.jit
def divisor(temperature):
    """T as logits are divided by it in float32; 1 where T = 0, which leaves the order as it is."""
    return tl.where(temperature == 0, 1.0, tl.maximum(temperature, SMALLEST_T)).to(tl.float32)


@triton.jit
def load_logits(row, tokens, width):
    """float32 logits of `tokens`: -inf behind the row's end, +inf for NaN."""
    raw = tl.load(row + tokens, mask=tokens < width, other=-float("inf")).to(tl.float32)
    return tl.where(raw != raw, float("inf"), raw)


@triton.jit
def is_fine(top):
    return (top > -float("inf")) & (top < float("inf"))


@triton.jit
def below(x, top):
    """x - top, `top` being the largest of x; -inf where it is not finite, since nothing follows from such a row."""
    fine = is_fine(top)
    return tl.where(fine, x - tl.where(fine, top, 0.0), -float("inf"))


@triton.jit
def inverse_of(total):
    """1 / total in float32; 0 where it is 0."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0).to(tl.float32)


@triton.jit
def exp_sum(x, top):
    """Sum of exp(x - top), `top` the largest of x."""
    return tl.sum(tl.exp(below(x, top)), axis=0)


@triton.jit
def store_parts(x, tokens, at, max_ptr, sum_ptr, arg_ptr):
    """The largest of a chunk's scaled logits, its lowest id, and their sum of exponentials."""
    top = tl.max(x, axis=0)
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, exp_sum(x, top))
    tl.store(arg_ptr + at, tl.min(tl.where(x == top, tokens, NO_INDEX), axis=0))


@triton.jit
def chunk_masses(tops, sums, top):
    """Sums [CHUNKS] float64 of exp(x - top) of every chunk, `top` being the row's largest logit."""
    has_weight = below(tops, top) > -NEGLIGIBLE
    distance = tl.where(has_weight, below(tops, top), 0.0).to(tl.float64)
    return tl.where(has_weight, sums.to(tl.float64) * tl.exp(distance), 0.0)


@triton.jit
def combine_parts(max_ptr, sum_ptr, arg_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """A row's largest scaled logit (float32), its lowest id, and the sum of exp(x - largest) (float64)."""
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    at = row * num_chunks + chunk
    tops = tl.load(max_ptr + at, mask=inside, other=-float("inf"))
    sums = tl.load(sum_ptr + at, mask=inside, other=0.0)
    args = tl.load(arg_ptr + at, mask=inside, other=NO_INDEX)
    top = tl.max(tops, axis=0)
    return top, tl.sum(chunk_masses(tops, sums, top), axis=0), tl.min(tl.where(tops == top, args, NO_INDEX), axis=0)


@triton.jit
def prob_at(row, token, width, temperature, top, total, arg):
    """p(token), a float32 number as in the reference's rows, in float64; 0 for ids outside the row."""
    inside = (token >= 0) & (token < width) & is_fine(top)
    raw = tl.load(row + token, mask=inside, other=-float("inf")).to(tl.float32)
    distance = below(tl.div_rn(raw, divisor(temperature)).to(tl.float64), top)
    prob = tl.exp(distance) / tl.where(total > 0, total, 1.0)
    prob = tl.where(temperature == 0, (token == arg).to(tl.float64), prob)
    return tl.where(inside, prob.to(tl.float32).to(tl.float64), 0.0)


@triton.jit
def probs_of_chunk(x, tokens, temperature, top, inverse, arg):
    """float32 probabilities of a chunk's scaled logits x, `inverse` being 1 over the row's sum of exponentials."""
    prob = tl.exp(below(x, top)) * inverse
    return tl.where(temperature == 0, (tokens == arg).to(tl.float32), prob)


@triton.jit
def first_above(cumulated, goal, weights, index, SIZE: tl.constexpr):
    """As in `functional.draw`: the first index with `cumulated > goal` and positive weight, else the last such one."""
    positive = weights > 0
    first = tl.min(tl.where(positive & (cumulated > goal), index, SIZE), axis=0)
    last = tl.max(tl.where(positive, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)
