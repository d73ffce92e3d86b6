"""Each statistical test fails by chance with a probability of at most 1e-9, shared by its comparisons."""

import functools
import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectoolkit.functional.noise import (
    Role,
    exponentials,
    position_keys,
    request_key,
    request_states,
    step_noise,
    uniforms,
)

FALSE_ALARM = 1e-9
MASK = (1 << 64) - 1


def make(seed: int, key: int, start: int, num_positions: int, role: Role = Role.EMIT) -> Tensor:
    return uniforms(torch.tensor([seed]), torch.tensor([key]), torch.tensor([start]), num_positions, role)[0]


def plain_python(seed: int, key: int, start: int, position: int, role: int) -> float:
    """The documented construction on unbounded integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    state = 0
    for word in (seed, key, 4 * start + role, position):
        state = mix((state + 0x9E3779B97F4A7C15 * ((word & MASK) + 1)) & MASK)
    return (mix(state) >> 11) / 2**53


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("seed", "key", "start"), [(0, 0, 0), (1, 2, 3), (-1, -(2**63), 7), (2**63 - 1, request_key("a"), 10**12)]
)
def test_the_construction_is_the_documented_one(seed: int, key: int, start: int, role: Role) -> None:
    expected = [plain_python(seed, key, start, start + j, role) for j in range(6)]
    assert make(seed, key, start, 6, role).tolist() == expected


def test_the_mixer_is_splitmix64() -> None:
    # First outputs of the published generator from seed 1234567.
    from spectoolkit.functional.noise import _GAMMA, _mix

    states = 1234567 + torch.arange(1, 4) * _GAMMA
    outputs = [word & MASK for word in _mix(states).tolist()]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_request_keys_are_stable_distinct_and_signed() -> None:
    assert request_key("") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little", signed=True)
    keys = {request_key(f"HumanEval/{i}") for i in range(2000)}
    assert len(keys) == 2000
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert min(keys) < 0 < max(keys)


def test_a_row_depends_on_its_own_key_alone() -> None:
    seeds, keys, starts = torch.tensor([3, 4, 3]), torch.tensor([7, 7, 8]), torch.tensor([0, 5, 9])
    batch = uniforms(seeds, keys, starts, 4, Role.ACCEPT)
    for row in range(3):
        alone = uniforms(seeds[row : row + 1], keys[row : row + 1], starts[row : row + 1], 9, Role.ACCEPT)
        assert torch.equal(batch[row], alone[0, :4])
    assert batch.dtype == torch.float64
    assert uniforms(seeds, keys, starts, 0, Role.DRAFT).shape == (3, 0)


def test_a_later_step_has_fresh_noise_for_the_same_position() -> None:
    assert not set(make(1, 2, 10, 8).tolist()) & set(make(1, 2, 12, 8).tolist())


def test_values_are_53_bit_fractions_below_one() -> None:
    numbers = make(5, 6, 0, 100_000)
    scaled = numbers * 2.0**53
    assert torch.equal(scaled, scaled.floor())
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert (scaled.to(torch.int64) & 1).float().mean().item() == pytest.approx(0.5, abs=0.01)


@functools.cache
def streams(num: int) -> dict[str, Tensor]:
    """Uniforms along each word of the key, the others fixed."""
    zeros, counter = torch.zeros(num, dtype=torch.int64), torch.arange(num)
    hashed = torch.tensor([request_key(str(i)) for i in range(num)])
    return {
        "positions": make(0, 1, 0, num),
        "seeds": uniforms(counter, zeros, zeros, 1, Role.EMIT)[:, 0],
        "starts": uniforms(zeros, zeros, counter, 1, Role.EMIT)[:, 0],
        "small keys": uniforms(zeros, counter, zeros, 1, Role.EMIT)[:, 0],
        "hashed keys": uniforms(zeros, hashed, zeros, 1, Role.EMIT)[:, 0],
        "seeds and starts": uniforms(counter % 256, zeros, counter // 256, 1, Role.EMIT)[:, 0],
    }


def test_equidistribution_along_every_word() -> None:
    size, bins = 1 << 16, 256
    tests = streams(size)
    limit = stats.chi2.isf(FALSE_ALARM / (2 * len(tests)), bins - 1)
    for name, numbers in tests.items():
        for bits in (numbers, (numbers * 2**20) % 1):  # leading and later bits
            counts = torch.bincount((bits * bins).to(torch.int64), minlength=bins).double()
            assert ((counts - size / bins) ** 2).sum() / (size / bins) < limit, name


def test_neighbours_along_every_word_are_independent() -> None:
    size, bins = 1 << 16, 16
    tests = streams(size)
    lags = (1, 2, 3, 64)
    limit = stats.chi2.isf(FALSE_ALARM / (len(tests) * len(lags)), bins**2 - 1)
    for (name, numbers), lag in itertools.product(tests.items(), lags):
        # Pairs that share no number, so that the cells are multinomial.
        first, second = numbers[: size // (2 * lag) * 2 * lag].view(-1, 2, lag).unbind(1)
        assert _pair_statistic(first.flatten(), second.flatten(), bins) < limit, (name, lag)


def test_roles_steps_seeds_and_requests_are_independent_of_each_other() -> None:
    size, bins = 1 << 16, 16
    base = make(0, 1, 0, size, Role.DRAFT)
    others = {
        "role accept": make(0, 1, 0, size, Role.ACCEPT),
        "role emit": make(0, 1, 0, size, Role.EMIT),
        "next position": make(0, 1, 0, size + 1, Role.ACCEPT)[1:],
        "next step": torch.cat([torch.zeros(1), make(0, 1, 1, size - 1, Role.DRAFT)]),
        "next seed": make(1, 1, 0, size, Role.DRAFT),
        "next request": make(0, 2, 0, size, Role.DRAFT),
        "seed and request exchanged": make(1, 0, 0, size, Role.DRAFT),
        "opposite seed": make(-1, 1, 0, size, Role.DRAFT),
    }
    limit = stats.chi2.isf(FALSE_ALARM / len(others), bins**2 - 1)
    for name, other in others.items():
        assert _pair_statistic(base[1:], other[1:], bins) < limit, name
    assert _pair_statistic(base, base, bins) > limit, "the test must be able to fail"


def _pair_statistic(first: Tensor, second: Tensor, bins: int) -> Tensor:
    cells = (first * bins).to(torch.int64) * bins + (second * bins).to(torch.int64)
    expected = len(first) / bins**2
    return ((torch.bincount(cells, minlength=bins**2) - expected) ** 2).sum() / expected


@pytest.mark.parametrize("word", ["seed", "key", "start", "position", "role"])
def test_avalanche(word: str) -> None:
    """Flipping any bit of the key flips every bit of the number with probability 1/2."""
    size = 4096
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randint(0, 10**6, (size,), generator=generator) for name in ("seed", "key", "start")}
    num_bits = {"seed": 64, "key": 64, "start": 40, "position": 8, "role": 1}[word]
    # The false alarm probability is shared by input bits, output bits and both sides.
    limit = stats.binom.isf(FALSE_ALARM / (num_bits * 53 * 2), size, 0.5)
    for bit in range(num_bits):
        changed, positions, role = dict(base), 1, Role.DRAFT
        flip = (1 << bit) - (1 << 64 if bit == 63 else 0)
        if word == "role":
            role = Role.ACCEPT
        elif word == "position":
            positions = 1 + flip
        else:
            changed[word] = base[word] ^ flip
        before = uniforms(base["seed"], base["key"], base["start"], 1, Role.DRAFT)[:, 0]
        after = uniforms(changed["seed"], changed["key"], changed["start"], positions, role)[:, -1]
        flipped = (before * 2**53).to(torch.int64) ^ (after * 2**53).to(torch.int64)
        counts = ((flipped[:, None] >> torch.arange(53)) & 1).sum(0)
        assert (counts - size / 2).abs().max() <= limit - size / 2


# Shared noise


def shared(seed: int, key: int, start: int, num_positions: int, vocab_size: int) -> Tensor:
    keys = position_keys(torch.tensor([seed]), torch.tensor([key]), torch.tensor([start]), num_positions)
    return exponentials(keys, vocab_size)[0]


def test_shared_noise_is_the_documented_construction() -> None:
    for seed, key, position in [(0, 0, 0), (-1, -(2**63), 7), (2**63 - 1, request_key("a"), 10**12)]:
        # The words (seed, key, 4 * position + role, token) of a uniform, of which it takes 52 bits.
        numbers = [plain_python(seed, key, position, token, Role.SHARED) for token in range(6)]
        expected = [-math.log((math.floor(number * 2**52) + 0.5) / 2**52) for number in numbers]
        assert shared(seed, key, position, 1, 6)[0].tolist() == pytest.approx(expected, rel=1e-14)


def test_shared_noise_knows_the_position_and_not_the_step() -> None:
    assert torch.equal(shared(1, 2, 10, 8, 5)[2:], shared(1, 2, 12, 6, 5))
    assert torch.equal(shared(1, 2, 10, 3, 5), shared(1, 2, 10, 3, 9)[:, :5])
    assert not set(shared(1, 2, 10, 1, 50).flatten().tolist()) & set(shared(1, 2, 11, 1, 50).flatten().tolist())
    assert shared(1, 2, 3, 0, 5).shape == (0, 5)


def test_shared_noise_is_exponential_and_independent_of_all_other_noise() -> None:
    size, bins = 1 << 16, 16
    by_position = (-shared(0, 1, 0, size, 1)[:, 0]).exp()
    by_token = (-shared(0, 1, 0, 1, size)[0]).exp()
    limit = stats.chi2.isf(FALSE_ALARM / 12, bins**2 - 1)
    for numbers in (by_position, by_token):
        counts = torch.bincount((numbers * bins**2).to(torch.int64), minlength=bins**2).double()
        assert ((counts - size / bins**2) ** 2).sum() / (size / bins**2) < limit
        assert _pair_statistic(numbers[::2], numbers[1::2], bins) < limit
    others = {role: make(0, 1, 0, size, role) for role in (Role.DRAFT, Role.ACCEPT, Role.EMIT)}
    for role, other in others.items():
        assert _pair_statistic(by_position, other, bins) < limit, role
    assert _pair_statistic(by_position, (-shared(0, 1, 0, size, 2)[:, 1]).exp(), bins) < limit
    assert _pair_statistic(by_position, (-shared(1, 1, 0, size, 1)[:, 0]).exp(), bins) < limit
    assert _pair_statistic(by_position, (-shared(0, 1, 0, size, 1)[:, 0]).exp(), bins) > limit


def test_shared_noise_is_positive_and_finite_at_the_extreme_bits(monkeypatch) -> None:
    for words in (0, -1):
        monkeypatch.setattr("spectoolkit.functional.noise._mix", lambda bits, words=words: torch.full_like(bits, words))
        numbers = exponentials(torch.tensor([3]), 4)
        assert (numbers > 0).all()
        assert numbers.isfinite().all()


def test_the_noise_of_a_whole_step_is_that_of_its_parts() -> None:
    seeds, keys = torch.tensor([0, -5, 2**62]), torch.tensor([7, request_key("a"), -1])
    starts = torch.tensor([0, 11, 2**40])
    found, shared = step_noise(request_states(seeds, keys), starts, 6)
    for role in (Role.DRAFT, Role.ACCEPT, Role.EMIT):
        assert torch.equal(found[:, role], uniforms(seeds, keys, starts, 6, role))
    assert torch.equal(shared, position_keys(seeds, keys, starts, 6))
