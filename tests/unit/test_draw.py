import pytest
import torch
from scipy import stats

from spectoolkit.functional.acceptance import coupled_overlap, overlap
from spectoolkit.functional.draw import draw, gumbel_max
from spectoolkit.functional.noise import exponentials, position_keys

LARGEST = 1 - 2.0**-53


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def uniforms(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_inverse_cdf_by_hand() -> None:
    probs = rows([0.25, 0.5, 0.25]).expand(6, 3)
    drawn = draw(probs, uniforms(0.0, 0.2499, 0.25, 0.7499, 0.75, LARGEST))
    assert drawn.tolist() == [0, 0, 1, 1, 2, 2]
    assert drawn.dtype == torch.int64


def test_the_extreme_uniforms_give_tokens_of_positive_probability() -> None:
    probs = rows([0, 0, 0.3, 0, 0.7, 0, 0])
    assert draw(probs, uniforms(0.0)).tolist() == [2]
    assert draw(probs, uniforms(LARGEST)).tolist() == [4]


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 512, 1000, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_equals_a_search_in_the_plain_running_sum(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(4, 5, vocab_size, generator=generator, dtype=dtype)
    weights[torch.rand(weights.shape, generator=generator) < 0.5] = 0
    weights[..., vocab_size // 2] = 0.3
    numbers = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    cdf = weights.to(torch.float64).cumsum(-1)
    expected = torch.searchsorted(cdf, (numbers * cdf[..., -1])[..., None], right=True).squeeze(-1)
    assert torch.equal(draw(weights, numbers), expected)


@pytest.mark.parametrize("scale", [1e-30, 0.1, 7.0, 1e30])
def test_weights_need_not_be_normalised(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(64, 700, generator=generator, dtype=torch.float64)
    numbers = torch.rand(64, generator=generator, dtype=torch.float64)
    assert torch.equal(draw(weights * scale, numbers), draw(weights, numbers))


@pytest.mark.parametrize("number", [0.0, 0.5, LARGEST])
def test_no_token_of_probability_zero_in_a_sparse_row(number: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(300, 3000, generator=generator) ** 40  # many orders of magnitude, and zeros
    weights[torch.rand(weights.shape, generator=generator) < 0.99] = 0
    weights[torch.arange(300), torch.randint(3000, (300,), generator=generator)] = 1e-38
    drawn = draw(weights, torch.full((300,), number, dtype=torch.float64))
    assert (weights.gather(-1, drawn[:, None]) > 0).all()


def test_the_smallest_weights_are_reached() -> None:
    tiny = torch.finfo(torch.float32).tiny
    weights = torch.zeros(1, 49152)
    weights[0, 40000], weights[0, 40001] = tiny, tiny
    assert draw(weights, uniforms(0.49)).tolist() == [40000]
    assert draw(weights, uniforms(0.51)).tolist() == [40001]


def test_rows_without_meaning_stay_in_range_and_leave_the_others_alone() -> None:
    weights = torch.rand(4, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    numbers = uniforms(0.3, 0.4, 0.5, LARGEST)
    expected = draw(weights, numbers)
    weights[1], weights[3] = torch.nan, 0
    drawn = draw(weights, numbers)
    assert drawn[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert ((drawn >= 0) & (drawn < 600)).all()


def test_the_arguments_are_left_alone_and_views_are_welcome() -> None:
    weights = torch.rand(3, 4, 600, generator=torch.Generator().manual_seed(3))
    numbers = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    before = weights.clone()
    transposed = draw(weights.transpose(0, 1), numbers.T)
    assert torch.equal(transposed.T, draw(weights, numbers))
    assert torch.equal(weights, before)


# Gumbel-max with shared noise. Every statistical test fails by chance with a probability of 1e-9.

FALSE_ALARM = 1e-9
P, Q = torch.tensor([0.45, 0.3, 0.2, 0.05]).double(), torch.tensor([0.15, 0.3, 0.25, 0.3]).double()


def shared_keys(num: int, request: int = 0) -> torch.Tensor:
    return position_keys(torch.tensor([0]), torch.tensor([request]), torch.tensor([0]), num)[0]


def fit(counts: torch.Tensor, law: torch.Tensor) -> float:
    return float(stats.chisquare(counts.numpy(), (law / law.sum() * counts.sum()).numpy()).pvalue)


@pytest.mark.parametrize("row", [P, Q])
def test_gumbel_max_follows_the_row(row: torch.Tensor) -> None:
    num = 200_000
    counts = torch.bincount(gumbel_max(row.expand(num, 4), shared_keys(num)), minlength=4)
    assert fit(counts, row) > FALSE_ALARM
    # Power: a row at a total variation of 0.01 is told apart.
    shifted = row + torch.tensor([-0.01, 0.01, 0, 0]).double()
    assert fit(counts, shifted) < FALSE_ALARM


def test_two_rows_with_the_same_noise_agree_as_the_formula_says() -> None:
    num, keys = 200_000, shared_keys(200_000)
    x, y = gumbel_max(P.expand(num, 4), keys), gumbel_max(Q.expand(num, 4), keys)
    at = torch.stack([1 / torch.maximum(P / P[i], Q / Q[i]).sum() for i in range(4)])
    law = torch.cat([at, 1 - at.sum(0, keepdim=True)])
    counts = torch.bincount(torch.where(x == y, x, 4), minlength=5)
    assert fit(counts, law) > FALSE_ALARM
    assert at.sum().item() == pytest.approx(coupled_overlap(P, Q).item())
    # Power: neither the overlap of a maximal coupling, nor the bound, nor independence.
    agreeing = int((x == y).sum())
    variation = 1 - overlap(P, Q).item()
    for rate in (1 - variation, (1 - variation) / (1 + variation), float((P * Q).sum())):
        assert stats.binomtest(agreeing, num, rate).pvalue < FALSE_ALARM
    other = gumbel_max(Q.expand(num, 4), shared_keys(num, request=1))
    assert stats.binomtest(int((x == other).sum()), num, float((P * Q).sum())).pvalue > FALSE_ALARM


def test_gumbel_max_never_gives_a_token_without_weight() -> None:
    rows = torch.tensor([[0, 0, 1, 0], [0, 0.5, 0, 0.5], [1e-300, 0, 0, 0]], dtype=torch.float64)
    keys = shared_keys(3000).view(1000, 3)
    drawn = gumbel_max(rows.expand(1000, 3, 4), keys)
    assert (drawn[:, 0] == 2).all()
    assert set(drawn[:, 1].tolist()) == {1, 3}
    assert (drawn[:, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_max_of_many_rows_is_that_of_each_row(dtype: torch.dtype) -> None:
    rows = torch.softmax(torch.randn(3, 5, 30_000, generator=torch.Generator().manual_seed(0), dtype=dtype), -1)
    keys = shared_keys(15).view(3, 5)
    drawn = gumbel_max(rows, keys)
    expected = (rows.double().log() - exponentials(keys, 30_000).log()).argmax(-1)
    assert torch.equal(drawn, expected)
    assert torch.equal(drawn[1:2, 3:], gumbel_max(rows[1:2, 3:], keys[1:2, 3:]))
    assert gumbel_max(rows[:, :0], keys[:, :0]).shape == (3, 0)
