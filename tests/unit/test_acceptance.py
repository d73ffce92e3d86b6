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


def test_coupled_overlap_is_the_double_sum_and_keeps_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in range(1, 8):
        p, q = torch.softmax(2 * torch.randn(2, 50, size, generator=generator, dtype=torch.float64), -1)
        for row in range(0, 50, 5):
            p[row, : row % size], q[row, : (row + 2) % size] = 0, 0
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        found = acceptance.coupled_overlap(p, q)
        for row in range(50):
            ratios = [
                sum(max(float(p[row, y] / p[row, x]), float(q[row, y] / q[row, x])) for y in range(size))
                for x in range(size)
                if p[row, x] > 0 and q[row, x] > 0
            ]
            assert found[row].item() == pytest.approx(sum(1 / ratio for ratio in ratios), abs=1e-12)
        variation = 1 - acceptance.overlap(p, q)
        assert (found >= (1 - variation) / (1 + variation) - 1e-12).all()
        assert (found <= 1 - variation + 1e-12).all()
        assert torch.allclose(found, acceptance.coupled_overlap(q, p), atol=1e-12)
        assert torch.allclose(acceptance.coupled_overlap(p, p), torch.ones(50, dtype=torch.float64), atol=1e-12)


def test_sparse_rows() -> None:
    ids, probs = torch.tensor([[2, 0], [1, 7]]), torch.tensor([[0.6, 0.4], [0.3, 0.7]], dtype=torch.float64)
    assert acceptance.sparse_row(ids, probs, 4).tolist() == [[0.4, 0, 0.6, 0], [0, 0.3, 0, 0]]
    found = acceptance.sparse_probs_of(ids, probs, torch.tensor([2, 2]))
    assert found.tolist() == [0.6, 0]
    assert acceptance.sparse_probs_of(ids, probs, torch.tensor([-1, 7])).tolist() == [0, 0.7]


@pytest.mark.parametrize("num_kept", [1, 2, 5])
def test_residual_mass_of_a_sparse_row_is_that_of_the_whole_row(num_kept: int) -> None:
    generator = torch.Generator().manual_seed(num_kept)
    p, q = torch.softmax(torch.randn(2, 40, 5, generator=generator, dtype=torch.float64), -1)
    scale = torch.rand(40, generator=generator, dtype=torch.float64)
    probs, ids = q.topk(num_kept, dim=-1)
    probs = probs / probs.sum(-1, keepdim=True)
    dense = acceptance.residual_mass(p, acceptance.sparse_row(ids, probs, 5), scale)
    assert torch.allclose(dense, acceptance.sparse_residual_mass(p, ids, probs, scale), atol=1e-14)
    # Vocabularies of different size, either way.
    assert torch.equal(acceptance.residual_mass(p, q[:, :3], scale), acceptance.residual_mass(p, q * mask(3), scale))
    shorter = p[:, :3] / p[:, :3].sum(-1, keepdim=True)
    dense = acceptance.residual_mass(shorter, acceptance.sparse_row(ids, probs, 5), scale)
    assert torch.allclose(dense, acceptance.sparse_residual_mass(shorter, ids, probs, scale), atol=1e-14)


def mask(size: int) -> torch.Tensor:
    return torch.arange(5) < size


def test_matched_block() -> None:
    sampled = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    tokens = torch.tensor([[5, 6], [5, 9], [5, -1]])
    num_accepted, emitted, matched = acceptance.matched_block(sampled, tokens, torch.tensor([2, 2, 1]))
    assert num_accepted.tolist() == [2, 1, 1]
    assert emitted.tolist() == [[5, 6, 7], [5, 6, -1], [5, 6, -1]]
    assert matched.tolist() == [[True, True], [True, False], [True, False]]


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


@pytest.mark.parametrize("width", [2, 3, 5])
def test_probabilities_in_two_rows_are_those_in_each(width: int) -> None:
    rows, others = torch.rand(4, 3), torch.rand(4, width).half()
    tokens = torch.tensor([0, width - 1, 7, -1])
    for found, of in zip(acceptance.both_probs_of(rows, others, tokens), (rows, others), strict=True):
        assert found.dtype == torch.float64
        assert torch.equal(found, acceptance.probs_of(of, tokens))


def test_all_positive() -> None:
    for values, expected in (([0.1, 2.0], True), ([0.1, 0.0], False), ([0.1, torch.nan], False), ([], True)):
        assert acceptance.all_positive(torch.tensor(values)) is expected


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
    assert acceptance.prefix_length(accepted & acceptance.is_drafted(torch.tensor([3, 3, 2, 3, 0]), 3)).tolist() == [
        1,
        3,
        2,
        0,
        0,
    ]
    assert acceptance.prefix_length(torch.empty(2, 0, dtype=torch.bool)).tolist() == [0, 0]


def test_emitted_block() -> None:
    tokens = torch.tensor([[5, 6, 7], [5, 6, -1], [5, 6, 7], [-1, -1, -1]])
    block = acceptance.emitted_block(tokens, torch.tensor([3, 1, 0, 0]), torch.tensor([8, 9, -1, 4]))
    assert block.tolist() == [[5, 6, 7, 8], [5, 9, -1, -1], [-1, -1, -1, -1], [4, -1, -1, -1]]


def test_take() -> None:
    rows = torch.arange(12).view(2, 3, 2)
    assert acceptance.take(rows, torch.tensor([2, 0])).tolist() == [[4, 5], [6, 7]]
    assert acceptance.take(rows[1:], torch.tensor([2])).tolist() == [[10, 11]]
