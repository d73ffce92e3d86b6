"""Noise made by kernels: integers and uniforms of the reference to the last bit, exponentials up to the logarithm's."""

import pytest
import torch

from spectoolkit.functional import noise as reference
from spectoolkit.functional.noise import Role, position_keys

noise = pytest.importorskip("spectoolkit.kernels.noise")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = [torch.tensor(words) for words in ([0, -1, 2**63 - 1], [0, -(2**63), 77], [0, 7, 10**12])]


@triton.jit
def _leading_bits(keys, out, size, CHUNK: tl.constexpr):
    token = tl.arange(0, CHUNK)
    bits = noise.shift_right(noise.mix(noise.absorb(tl.load(keys + tl.program_id(0)), token.to(tl.int64))), 12)
    tl.store(out + tl.program_id(0) * size + token, bits, mask=token < size)


def test_the_integers_behind_shared_noise_are_the_same_to_the_last_bit():
    keys = position_keys(*KEYS, 1)[:, 0]
    out = torch.empty((3, 50), dtype=torch.int64, device=DEVICE)
    _leading_bits[(3,)](keys.to(DEVICE), out, 50, CHUNK=64)
    words = reference._mix(reference._absorb(keys[:, None], torch.arange(50)))
    assert torch.equal(out.cpu(), reference._shift_right(words, 12))


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("num_positions", [0, 1, 33])
def test_uniforms_are_the_same_to_the_last_bit(role, num_positions):
    found = noise.uniforms(*[words.to(DEVICE) for words in KEYS], num_positions, role, chunk=16)
    assert torch.equal(found.cpu(), reference.uniforms(*KEYS, num_positions, role))


@pytest.mark.parametrize("vocab_size", [1, 40, 1000])
def test_exponentials_agree_up_to_the_rounding_of_the_logarithm(vocab_size):
    keys = position_keys(*KEYS, 2)
    found, expected = noise.exponentials(keys.to(DEVICE), vocab_size).cpu(), reference.exponentials(keys, vocab_size)
    assert found.shape == (3, 2, vocab_size)
    torch.testing.assert_close(found, expected, rtol=2.0**-51, atol=0)
