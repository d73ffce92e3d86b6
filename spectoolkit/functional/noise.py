"""Counter-based noise: every uniform is a pure function of what it is for, so there is no generator state.

Construction. With the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; constants are Stafford's variant 13 of MurmurHash3's) and its increment, all modulo 2^64,

    mix(z):        z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    absorb(h, w):  mix(h + GAMMA * (w + 1)),   GAMMA = 0x9E3779B97F4A7C15 (odd)

the words are absorbed one after the other from h = 0, then mixed once more:

    bits = mix(absorb(absorb(absorb(absorb(0, seed), request key), 4 * start + role), position))
    u    = (bits >> 11) / 2^53

Where a step drafts several chains, chain 0 has these numbers; for a chain c > 0 one more word, c, is absorbed behind
the position.

Noise that drafter and verifier share does not know the step: there the words are (seed, request key,
4 * position + SHARED, token). Its key [B, N] after the third word stands for a number per token of the vocabulary.

For fixed other words the bits are a bijection of each word, so keys that differ in one word never share their bits;
keys that differ in more words collide with the chance of random 64-bit numbers. In the last word this is the SplitMix64
stream that starts at `h`. Only int64 sums, products, shifts and bitwise operations are needed, and each number depends
on its own key alone: it is the same on every device, in every batch and for every block length.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


class Role(IntEnum):
    """What a uniform decides; at most four roles fit the key."""

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2
    SHARED = 3


def request_key(request_id: str) -> int:
    """A signed 64-bit key of a request's name, the same in every process: BLAKE2b of its UTF-8 bytes."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little", signed=True)


def uniforms(seeds: Tensor, request_keys: Tensor, starts: Tensor, num_positions: int, role: Role) -> Tensor:
    """Uniforms [B, N] float64 in [0, 1), multiples of 2^-53; column j is for position `starts[b] + j` of row b.

    The start of the step is part of the key besides the position: after a step rejects, later positions are drafted
    again, and noise that already took part in a decision must not come back.

    Args:
        seeds, request_keys: [B] int64, any values.
        starts: [B] int64 >= 0, below 2^61.
        num_positions: N.
        role: what the numbers decide.
    """
    return _fractions(_position_words(seeds, request_keys, starts, num_positions, role))


def request_states(seeds: Tensor, request_keys: Tensor) -> Tensor:
    """[B] int64, what the first two words leave: for `step_noise`, the same in every step of a request."""
    return _absorb(_absorb(torch.zeros_like(seeds), seeds), request_keys)


def step_noise(states: Tensor, starts: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """All noise of a step of one chain at once, in a fifth of the operations.

    Args:
        states: [B] `request_states`.
        starts, num_positions: as for `uniforms`.

    Returns:
        Uniforms [B, 3, N] of the roles DRAFT, ACCEPT and EMIT, as `uniforms` gives them, and `position_keys` [B, N].
    """
    positions = starts[:, None] + torch.arange(num_positions, device=starts.device)
    of_roles = _absorb(states[:, None], 4 * starts[:, None] + torch.arange(3, device=starts.device))
    found = _fractions(_absorb(of_roles[:, :, None], positions[:, None]))
    return found, _absorb(states[:, None], 4 * positions + int(Role.SHARED))


def chain_uniforms(
    seeds: Tensor, request_keys: Tensor, starts: Tensor, num_positions: int, role: Role, num_chains: int
) -> Tensor:
    """Uniforms [B, C, N] as `uniforms` gives them, for each of C chains; those of chain 0 are the same numbers."""
    first = _position_words(seeds, request_keys, starts, num_positions, role)[:, None]
    others = torch.arange(1, num_chains, device=starts.device)[:, None]
    return _fractions(torch.cat([first, _absorb(first, others)], dim=1))


def _position_words(seeds: Tensor, request_keys: Tensor, starts: Tensor, num_positions: int, role: Role) -> Tensor:
    """[B, N] what four words leave."""
    state = _absorb(request_states(seeds, request_keys), 4 * starts + int(role))
    positions = starts[:, None] + torch.arange(num_positions, device=starts.device)
    return _absorb(state[:, None], positions)


def _fractions(words: Tensor) -> Tensor:
    return _shift_right(_mix(words), 11).to(torch.float64) * 2.0**-53


def position_keys(seeds: Tensor, request_keys: Tensor, starts: Tensor, num_positions: int) -> Tensor:
    """Keys [B, N] int64 of the shared noise at the positions `starts[b] + j` of row b, for `exponentials`.

    Unlike `uniforms` they do not depend on the start but through the position: who draws again at a position meets the
    same noise. That is right only where the emitted token is the same function of it whatever was drafted.
    """
    state = request_states(seeds, request_keys)
    positions = starts[:, None] + torch.arange(num_positions, device=starts.device)
    return _absorb(state[:, None], 4 * positions + int(Role.SHARED))


def exponentials(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard exponentials E [..., V] float64 > 0, one per token, of `keys` [...]; G = -log E is Gumbel noise.

    E = -log((w + 1/2) / 2^52),   w the leading 52 bits of the construction above
    """
    tokens = torch.arange(vocab_size, device=keys.device)
    leading = _shift_right(_mix(_absorb(keys[..., None], tokens)), 12).to(torch.float64)
    return leading.add_(0.5).mul_(2.0**-52).log_().neg_()


def position_uniforms(keys: Tensor) -> Tensor:
    """Uniforms [...] float64 in [0, 1) of shared `keys` [...]: the same number at a position in every step.

        u = exp(-E),   E the key's exponential of token 0

    Only for noise that must not come back and does (negative controls); a verification needs `uniforms`. Keys that are
    no tensors may say themselves which uniforms they give (`torch.overrides`), as in `draw.gumbel_max`.
    """
    if has_torch_function_unary(keys):
        return handle_torch_function(position_uniforms, (keys,), keys)
    return torch.exp(-exponentials(keys, 1).squeeze(-1)).clamp(max=1 - 2.0**-53)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = _signed(0x94D049BB133111EB)


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    return _mix(state + (word + 1) * _GAMMA)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * _FIRST_FACTOR
    words = (words ^ _shift_right(words, 27)) * _SECOND_FACTOR
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, by: int) -> Tensor:
    """Logical shift: int64 shifts are arithmetic, so the copies of the sign are masked out."""
    return (words >> by) & ((1 << (64 - by)) - 1)
