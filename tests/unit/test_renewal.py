"""The recursion over step starts, against hand-made cases and brute force over coin tosses."""

import itertools

import pytest
import torch

from spectoolkit.functional.renewal import expected_counts, product_of_factors, running_minimum, windows

F64 = torch.float64


def counts(at_least, drafted, lengths):
    """One strategy per output."""
    return expected_counts(at_least[:, None], drafted[:, None], torch.tensor(lengths))


def test_windows():
    values = torch.tensor([[1.0, 2.0, 3.0]])
    assert windows(values, 2).tolist() == [[[1, 2], [2, 3], [3, 0]]]


def test_everything_accepted_takes_steps_of_k_plus_one():
    length, k = 12, 3
    budget = (torch.arange(length, 0, -1) - 1).clamp(max=k)[None]
    found = counts(torch.ones(1, length, k, dtype=F64), budget, [length])
    assert found.steps.item() == 3
    assert found.accepted.item() == 9
    assert found.drafted.item() == 9
    assert found.truncated.item() == 0
    assert found.accepted_at.flatten().tolist() == [3, 3, 3]
    assert found.reached_at.flatten().tolist() == [3, 3, 3]


def test_nothing_accepted_takes_a_step_per_token():
    budget = torch.tensor([[2, 2, 2, 1, 0]])
    found = counts(torch.zeros(1, 5, 2, dtype=F64), budget, [5])
    assert found.steps.item() == 5
    assert found.proposing_steps.item() == 4
    assert found.drafted_at.flatten().tolist() == [4, 3]
    assert found.reached_at.flatten().tolist() == [4, 0]


def test_an_end_of_sequence_inside_an_accepted_block_truncates_it():
    # Two tokens, the second an end of sequence; the step drafts four and accepts both: nothing behind is known.
    at_least = torch.ones(1, 2, 4, dtype=F64)
    found = counts(at_least, torch.full((1, 2), 4), [2])
    assert found.steps.item() == 1
    assert (found.accepted.item(), found.drafted.item(), found.truncated.item()) == (2, 4, 1)
    assert found.accepted_at.flatten().tolist() == [1, 1, 0, 0]
    assert found.reached_at.flatten().tolist() == [1, 1, 0, 0]
    # An end that was recovered and not drafted cuts nothing.
    at_least[0, 0, 1] = 0
    assert counts(at_least, torch.full((1, 2), 4), [2]).truncated.item() == 0


def test_padding_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    at_least = product_of_factors(torch.rand(2, 6, 3, dtype=F64, generator=generator))
    drafted = torch.full((2, 6), 3)
    together = counts(at_least, drafted, [6, 4])
    alone = counts(at_least[1:, :4], drafted[1:, :4], [4])
    for name in ("steps", "accepted", "drafted", "truncated", "reached_at"):
        torch.testing.assert_close(getattr(together, name)[1:], getattr(alone, name))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("limit", [4, 9])
def test_against_all_coin_tosses(k, limit):
    """Independent acceptance with known chances: every pattern of tosses is walked through by hand."""
    length = 4
    chance = torch.tensor([0.3, 0.9, 0.5, 0.2], dtype=F64)
    expected = dict.fromkeys(("steps", "proposing_steps", "drafted", "accepted", "truncated"), 0.0)

    def walk(start: int, weight: float) -> None:
        if start == length or weight == 0:
            return
        drafted = min(k, limit - start - 1)
        expected["steps"] += weight
        expected["proposing_steps"] += weight * (drafted > 0)
        expected["drafted"] += weight * drafted
        left = length - start
        for tosses in itertools.product((True, False), repeat=min(drafted, left)):
            p = weight
            for i, accepted in enumerate(tosses):
                p *= float(chance[start + i] if accepted else 1 - chance[start + i])
            num_accepted = next((i for i, accepted in enumerate(tosses) if not accepted), len(tosses))
            expected["accepted"] += p * num_accepted
            expected["truncated"] += p * (num_accepted + 1 > left)
            walk(start + min(num_accepted + 1, left), p)

    walk(0, 1.0)
    at_least = product_of_factors(windows(chance[None], k))
    budget = (limit - torch.arange(length) - 1).clamp(0, k)[None]
    found = counts(at_least, budget, [length])
    for name, value in expected.items():
        assert getattr(found, name).item() == pytest.approx(value, abs=1e-12), name


def test_running_minimum_lies_above_the_product_of_capped_ratios():
    ratios = torch.tensor([[[0.5, 4.0, 0.5], [2.0, 0.5, 0.5]]], dtype=F64)
    assert running_minimum(ratios).tolist() == [[[0.5, 0.5, 0.5], [1.0, 1.0, 0.5]]]
    assert (running_minimum(ratios) >= product_of_factors(ratios.clamp(max=1))).all()


def test_a_product_of_ratios_that_overflows_and_meets_a_zero_is_zero():
    found = running_minimum(torch.tensor([[[1e200, 1e200, 0.0, 1e200]]], dtype=torch.float64))
    assert found.tolist() == [[[1, 1, 0, 0]]]
