"""How work is cut, by the vocabulary's size alone."""

import pytest

from spectoolkit.kernels import launch


@pytest.mark.parametrize(
    ("vocab_size", "chunk", "warps"),
    [(1, 16, 1), (17, 32, 1), (1000, 1024, 2), (1024, 1024, 2), (2048, 2048, 4), (4097, 4096, 8), (262_144, 4096, 8)],
)
def test_chunks_cover_the_vocabulary_with_16_numbers_per_thread(vocab_size, chunk, warps):
    assert launch.chunk_size(vocab_size) == chunk
    assert launch.num_warps(chunk) == warps
    num = launch.num_chunks(vocab_size, chunk)
    assert (num - 1) * chunk < vocab_size <= num * chunk
    assert launch.padded(num) >= num
    assert launch.padded(num) & (launch.padded(num) - 1) == 0
