"""Chances of acceptance given the output's token, by numbers."""

import pytest
import torch

from spectoolkit.functional.conditional import given_coupled, given_match, given_rejection, ratio

TARGET = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64)
DRAFT = torch.tensor([[[0.2, 0.3, 0.5]]], dtype=torch.float64)


@pytest.mark.parametrize(("token", "expected"), [(0, 0.4), (1, 1.0), (2, 1.0), (-1, 0.0)])
def test_rejection(token, expected):
    assert given_rejection(TARGET, DRAFT, torch.tensor([[token]])).item() == pytest.approx(expected)


def test_averaged_over_the_targets_law_rejection_is_the_overlap_and_match_the_inner_product():
    chances = torch.stack([given_rejection(TARGET, DRAFT, torch.tensor([[x]]))[0, 0] for x in range(3)])
    assert float(chances @ TARGET[0, 0]) == pytest.approx(0.7)
    chances = torch.stack([given_match(TARGET, DRAFT, torch.tensor([[x]]))[0, 0] for x in range(3)])
    assert float(chances @ TARGET[0, 0]) == pytest.approx(0.29)


def test_coupled():
    # 1 / (max(.5, .2 * 2.5) + max(.3, .3 * 2.5) + max(.2, .5 * 2.5)) at token 0
    assert given_coupled(TARGET, DRAFT, torch.tensor([[0]])).item() == pytest.approx(1 / (0.5 + 0.75 + 1.25))
    assert given_coupled(TARGET, TARGET, torch.tensor([[1]])).item() == pytest.approx(1)
    assert given_coupled(TARGET, DRAFT, torch.tensor([[-1]])).item() == 0


@pytest.mark.parametrize("reduce", [ratio, given_rejection, given_match, given_coupled])
def test_a_near_tie_that_flips_between_two_passes_counts_as_what_was_emitted(reduce):
    """At temperature 0 the pass says token 1, the output has token 0: a draft of 0 was accepted, one of 1 was not."""
    scored = torch.tensor([[[0.0, 1.0, 0.0]]])
    emitted = torch.tensor([[0]])
    assert reduce(scored, torch.tensor([[[1.0, 0.0, 0.0]]]), emitted).item() == 1
    assert reduce(scored, torch.tensor([[[0.0, 1.0, 0.0]]]), emitted).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduce", [ratio, given_rejection, given_match, given_coupled])
def test_probabilities_near_the_smallest_number_give_no_nan(reduce, dtype):
    """At low temperatures q(x) or p(x) underflows almost, and a ratio of the two overflows float32."""
    tiny = 1e-42 if dtype == torch.float32 else 1e-320
    sharp, elsewhere = [tiny, 1.0, 0.0], [1.0, tiny, 0.0]
    for target, draft in ((sharp, elsewhere), (elsewhere, sharp), (sharp, sharp), ([0.0, 1.0, 0.0], elsewhere)):
        rows = [torch.tensor([[row]], dtype=dtype) for row in (target, draft)]
        for token in range(3):
            found = reduce(*rows, torch.tensor([[token]]))
            assert not found.isnan().any(), (target, draft, token)
            if reduce is not ratio:
                assert 0 <= found.item() <= 1 + 1e-12
    assert given_coupled(torch.tensor([[elsewhere]]), torch.tensor([[sharp]]), torch.tensor([[0]])).item() < 1e-30
