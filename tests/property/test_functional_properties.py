import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectoolkit.functional.draw import draw
from spectoolkit.functional.noise import Role, uniforms
from spectoolkit.functional.warp import warp
from tests.helpers.reference_warp import reference_warp

relaxed = settings(deadline=None, derandomize=True, max_examples=60)

params = st.tuples(
    st.sampled_from([0.0, 1e-4, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 100]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
# Multiples of 1/2 put ties everywhere.
logit_rows = st.lists(st.one_of(st.integers(-12, 12).map(lambda i: i / 2), st.floats(-30, 30)), min_size=1, max_size=9)
weight_rows = st.lists(st.one_of(st.just(0.0), st.floats(0, 1)), min_size=1, max_size=20).filter(any)
unit = st.one_of(st.sampled_from([0.0, 0.5, 1 - 2.0**-53]), st.floats(0, 1, exclude_max=True))
word = st.integers(-(2**63), 2**63 - 1)


def columns(rows: list[tuple[float, int, float, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature, top_k, top_p, min_p = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    return temperature, top_k.to(torch.int64), top_p, min_p


@relaxed
@given(logit_rows, params)
def test_warp_follows_its_definition(logits: list[float], row_params: tuple[float, int, float, float]) -> None:
    warped = warp(torch.tensor([[logits]], dtype=torch.float64), *columns([row_params]))[0, 0]
    assert warped.sum().item() == pytest.approx(1)
    assert warped.tolist() == pytest.approx(reference_warp(logits, *row_params), rel=1e-9, abs=1e-300)


@settings(relaxed, max_examples=25)
@given(st.lists(params, min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_a_row_does_not_depend_on_its_batch(
    batch: list[tuple[float, int, float, float]], seed: int, dtype: torch.dtype
) -> None:
    logits = 4 * torch.randn(len(batch), 3, 1100, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    together = warp(logits, *columns(batch))
    for row, (temperature, top_k, top_p, min_p) in enumerate(batch):
        alone = warp(
            logits[row : row + 1],
            torch.tensor([temperature], dtype=torch.float64),
            torch.tensor([top_k]) if top_k else None,
            torch.tensor([top_p], dtype=torch.float64) if top_p < 1 else None,
            torch.tensor([min_p], dtype=torch.float64) if min_p else None,
        )
        assert torch.equal(together[row], alone[0])


@relaxed
@given(weight_rows, unit, unit)
def test_draws_have_positive_weight_and_rise_with_the_uniform(weights: list[float], one: float, other: float) -> None:
    rows = torch.tensor([weights, weights], dtype=torch.float64)
    low, high = draw(rows, torch.tensor(sorted([one, other]), dtype=torch.float64)).tolist()
    assert weights[low] > 0
    assert weights[high] > 0
    assert low <= high


@relaxed
@given(word, word, st.integers(0, 2**60), st.sampled_from(list(Role)), st.integers(1, 6), st.integers(0, 6))
def test_noise_is_a_function_of_its_key(seed: int, key: int, start: int, role: Role, size: int, more: int) -> None:
    few = uniforms(torch.tensor([seed]), torch.tensor([key]), torch.tensor([start]), size, role)
    many = uniforms(torch.tensor([1, seed]), torch.tensor([2, key]), torch.tensor([3, start]), size + more, role)
    assert torch.equal(few[0], many[1, :size])
    assert ((few >= 0) & (few < 1)).all()
