import pytest
import torch

from spectoolkit.functional import acceptance


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


P, Q = row(0.5, 0.3, 0.2), row(0.2, 0.3, 0.5)


def test_overlap_is_one_minus_the_total_variation() -> None:
    assert acceptance.overlap(P, Q).item() == pytest.approx(0.7)
    assert acceptance.overlap(P, P).item() == pytest.approx(1.0)
    assert acceptance.overlap(torch.stack([P, Q]), torch.stack([Q, Q])).tolist() == pytest.approx([0.7, 1.0])
    assert acceptance.overlap(P.float(), Q.float()).dtype == torch.float64


def test_residual() -> None:
    assert acceptance.residual(P, Q).tolist() == pytest.approx([0.3, 0, 0])
    assert acceptance.residual(Q, P).tolist() == pytest.approx([0, 0, 0.3])


def test_an_empty_residual_falls_back_to_the_target_row_by_row() -> None:
    target, draft = row(0.5, 0.5), row(0.5005, 0.5)
    assert acceptance.residual(target, draft).tolist() == [0.5, 0.5]
    both = acceptance.residual(torch.stack([target, row(0.9, 0.1)]), torch.stack([draft, row(0.5, 0.5)]))
    assert both[0].tolist() == [0.5, 0.5]
    assert both[1].tolist() == pytest.approx([0.4, 0])


def test_point_mass_residual() -> None:
    tokens = torch.tensor([0, 2, 1])
    rows = torch.stack([P, P, row(0, 1, 0)])
    remaining = acceptance.point_mass_residual(rows, tokens)
    assert remaining.tolist() == [[0, 0.3, 0.2], [0.5, 0.3, 0], [0, 1, 0]]
    assert rows[0].tolist() == [0.5, 0.3, 0.2]


def test_vocabularies_of_different_size() -> None:
    target, draft = row(0.4, 0.3, 0.2, 0.1), row(0.5, 0.3, 0.2)
    assert acceptance.overlap(target, draft).item() == pytest.approx(0.9)
    assert acceptance.residual(target, draft).tolist() == pytest.approx([0, 0, 0, 0.1])
    assert acceptance.overlap(draft, target).item() == pytest.approx(0.9)
    assert acceptance.residual(draft, target).tolist() == pytest.approx([0.1, 0, 0])
    assert acceptance.point_mass_residual(draft, torch.tensor(3)).tolist() == draft.tolist()


def test_probabilities_of_tokens() -> None:
    found = acceptance.probs_of(torch.stack([P, Q, P, P]), torch.tensor([0, 2, 3, -1]))
    assert found.tolist() == [0.5, 0.5, 0, 0]
    poisoned = acceptance.probs_of(torch.full((1, 3), torch.nan), torch.tensor([-1]))
    assert poisoned.tolist() == [0]


@pytest.mark.parametrize(
    ("probs", "expected"),
    [
        ([0.6, 0.3, 0.1], 0.09),
        ([0.25] * 4, 0.075),
        ([0.01] * 100, 0.003),
        ([1.0, 0.0, 0.0], 0.09),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_typical_threshold(probs: list[float], expected: float, dtype: torch.dtype) -> None:
    threshold = acceptance.typical_threshold(torch.tensor(probs, dtype=dtype), epsilon=0.09, delta=0.3)
    assert threshold.item() == pytest.approx(expected, rel=1e-6)


def test_prefix_length_stops_at_the_first_rejection_and_at_the_end_of_the_proposal() -> None:
    accepted = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]]).bool()
    assert acceptance.prefix_length(accepted, torch.tensor([3, 3, 2, 3, 0])).tolist() == [1, 3, 2, 0, 0]
    assert acceptance.prefix_length(torch.empty(2, 0, dtype=torch.bool), torch.tensor([0, 0])).tolist() == [0, 0]


def test_emitted_block() -> None:
    tokens = torch.tensor([[5, 6, 7], [5, 6, -1], [5, 6, 7], [-1, -1, -1]])
    block = acceptance.emitted_block(tokens, torch.tensor([3, 1, 0, 0]), torch.tensor([8, 9, -1, 4]))
    assert block.tolist() == [[5, 6, 7, 8], [5, 9, -1, -1], [-1, -1, -1, -1], [4, -1, -1, -1]]


def test_take() -> None:
    rows = torch.arange(12).view(2, 3, 2)
    assert acceptance.take(rows, torch.tensor([2, 0])).tolist() == [[4, 5], [6, 7]]
