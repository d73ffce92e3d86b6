import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spectoolkit.datatypes import SamplingParams
from spectoolkit.functional.acceptance import overlap
from spectoolkit.functional.warp import Penalties, _keep_by_leading, _keep_by_sorting, _softmax_of_mixed, penalise, warp
from tests.helpers.reference_warp import reference_warp

FLOATS = [torch.float32, torch.float64]


def warp_row(
    logits: Sequence[float] | Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    def column(value: float | None) -> Tensor | None:
        return None if value is None else torch.tensor([value])

    row = torch.as_tensor(logits, dtype=dtype)[None, None]
    warped = warp(row, torch.tensor([temperature], dtype=torch.float64), column(top_k), column(top_p), column(min_p))
    assert warped.dtype == dtype
    assert warped.shape == row.shape
    return warped[0, 0].tolist()


def logs(probs: Sequence[float]) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probs]


# Temperature


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.7])
def test_temperature_divides_the_logits_exactly_once(temperature: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    expected = torch.softmax(logits / temperature, -1)
    assert warp_row(logits, temperature) == pytest.approx(expected.tolist(), rel=1e-14)
    assert warp_row(logits, temperature, dtype=torch.float32) == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_greedy_and_sampling_rows_share_a_batch(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]], dtype=dtype)
    warped = warp(logits, torch.tensor([0.0, 0.7], dtype=torch.float64), None, None, None)
    assert warped[0, 0].tolist() == [0, 1]
    assert warped[1, 0].tolist() == pytest.approx([1 / (1 + math.exp(1 / 0.7)), 1 / (1 + math.exp(-1 / 0.7))], rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300])
def test_tiny_temperatures_neither_overflow_nor_divide_by_zero(temperature: float, dtype: torch.dtype) -> None:
    assert warp_row([0.0, 200.0], temperature, dtype=dtype) == [0, 1]
    assert warp_row([200.0, 200.0, -1e30], temperature, dtype=dtype) == [0.5, 0.5, 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [2, 7, 8, 33, 4096, 49152])
def test_greedy_ties_go_to_the_lowest_id(size: int, dtype: torch.dtype) -> None:
    for tied in ([0, 1], [size // 2, size - 1], list(range(size // 3, size))):
        logits = torch.zeros(2, 1, size, dtype=dtype)
        logits[:, :, tied] = 5.0
        for temperature in ([0.0, 0.0], [0.0, 1.0]):
            row = warp(logits, torch.tensor(temperature, dtype=torch.float64), None, None, None)[0, 0]
            assert row.nonzero().flatten().tolist() == [min(tied)]
            assert row.sum() == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_greedy_rows_are_one_hot_for_any_finite_logits(dtype: torch.dtype) -> None:
    huge = torch.finfo(dtype).max
    rows = [
        [1e30, 1.0000001e30, -math.inf],
        [-huge, -huge / 2, -huge],
        [huge / 2, 0, huge / 4],
        [0, -0.0, -1],
        [1e-40, 0, 0],
    ]
    winners = [1 if dtype == torch.float64 or torch.tensor(1e30) < 1.0000001e30 else 0, 1, 0, 0, 0]
    logits = torch.tensor(rows, dtype=dtype)[:, None]
    all_greedy = warp(logits, torch.zeros(5, dtype=torch.float64), None, None, None)
    assert all_greedy.argmax(-1).flatten().tolist() == winners
    assert all_greedy.sort(-1).values.tolist() == [[[0, 0, 1]]] * 5
    assert torch.equal(_softmax_of_mixed(logits, torch.zeros(5, dtype=torch.float64)), all_greedy)


def test_the_shortcuts_for_uniform_batches_give_the_same_bits() -> None:
    logits = torch.randn(4, 3, 500, generator=torch.Generator().manual_seed(1)) * 5
    for temperature in ([0.0] * 4, [1.0] * 4, [0.7] * 4, [0.0, 0.7, 1.0, 1e-4]):
        column = torch.tensor(temperature, dtype=torch.float64)
        assert torch.equal(warp(logits, column, None, None, None), _softmax_of_mixed(logits, column))


def test_half_precision_logits_are_computed_in_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        warped = warp(torch.tensor([[[0.0, -20.0]]], dtype=dtype), torch.ones(1, dtype=torch.float64), None, None, None)
        assert warped.dtype == torch.float32
        assert warped[0, 0, 1].item() == pytest.approx(2.061e-9, rel=1e-3)


def test_masked_logits_get_probability_zero() -> None:
    assert warp_row([0.0, -math.inf, 0.0]) == [0.5, 0, 0.5]
    assert warp_row([0.0, -math.inf, 0.0], 0.5, top_k=3, top_p=0.99, min_p=0.01) == [0.5, 0, 0.5]
    assert warp_row([-math.inf, -math.inf, 3.0], 0.0, top_k=2) == [0, 0, 1]


def test_the_logits_are_left_alone() -> None:
    logits = torch.randn(3, 2, 2000, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    ones = torch.ones(3, dtype=torch.float64)
    for temperature in (0 * ones, ones, torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)):
        warped = warp(logits, temperature, torch.tensor([0, 5, 900]), 0.9 * ones, 0.1 * ones)
        assert warped.data_ptr() != logits.data_ptr()
        assert torch.equal(logits, before)


# Filters


@pytest.mark.parametrize("dtype", FLOATS)
def test_top_p_that_a_prefix_reaches_exactly(dtype: torch.dtype) -> None:
    warped = warp_row(logs([0.4, 0.3, 0.2, 0.1]), top_p=0.9, dtype=dtype)
    assert warped == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], rel=1e-6)
    assert warped[3] == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_top_p_on_both_sides_of_a_pair_of_models(dtype: torch.dtype) -> None:
    target, draft = logs([0.5, 0.3, 0.15, 0.05]), logs([0.4, 0.3, 0.22, 0.08])
    p, q = (torch.tensor(warp_row(row, top_p=0.9, dtype=dtype), dtype=dtype) for row in (target, draft))
    assert p.tolist() == pytest.approx([0.526316, 0.315789, 0.157895, 0], abs=1e-6)
    assert q.tolist() == pytest.approx([0.434783, 0.326087, 0.239130, 0], abs=1e-6)
    assert overlap(p, q).item() == pytest.approx(0.908467, abs=1e-6)
    raw_p, raw_q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.4, 0.3, 0.22, 0.08])
    assert overlap(raw_p, q).item() == pytest.approx(0.884783, abs=1e-6)
    assert overlap(p, raw_q).item() == pytest.approx(0.857895, abs=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_min_p(dtype: torch.dtype) -> None:
    assert warp_row(logs([0.6, 0.3, 0.1]), min_p=0.2, dtype=dtype) == pytest.approx([2 / 3, 1 / 3, 0], rel=1e-6)
    assert warp_row(logs([0.6, 0.3, 0.1]), min_p=0.5, dtype=dtype) == pytest.approx([2 / 3, 1 / 3, 0], rel=1e-6)
    assert warp_row(logs([0.25] * 4), min_p=1.0, dtype=dtype) == pytest.approx([0.25] * 4, rel=1e-6)


def test_filters_apply_one_after_the_other() -> None:
    # top-k leaves [.4, .3, .2] of mass .9, of which top-p .75 needs two: .7 / .9 = .78 (without top-k it needs three).
    assert warp_row(logs([0.4, 0.3, 0.2, 0.1]), top_k=3, top_p=0.75) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert warp_row(logs([0.4, 0.3, 0.2, 0.1]), top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert warp_row(logs([0.5, 0.3, 0.15, 0.05]), top_k=3, top_p=0.99, min_p=0.5) == pytest.approx([5 / 8, 3 / 8, 0, 0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_at_a_boundary_are_broken_by_the_lowest_id(dtype: torch.dtype) -> None:
    probs = [0.1, 0.2, 0.3, 0.2, 0.2]
    assert [p > 0 for p in warp_row(logs(probs), top_k=2, dtype=dtype)] == [False, True, True, False, False]
    assert [p > 0 for p in warp_row(logs(probs), top_p=0.7, dtype=dtype)] == [False, True, True, True, False]
    flat = torch.zeros(5000)
    assert torch.tensor(warp_row(flat, top_k=7, dtype=dtype)).nonzero().flatten().tolist() == list(range(7))
    assert torch.tensor(warp_row(flat, top_p=0.001, dtype=dtype)).nonzero().flatten().tolist() == list(range(5))


@pytest.mark.parametrize("dtype", FLOATS)
def test_top_k_one_is_the_greedy_token_even_where_probabilities_round_to_a_tie(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.1, 0.1, 0.1], dtype=dtype)
    logits[1] = torch.nextafter(logits[1], torch.tensor(1.0, dtype=dtype))
    assert warp_row(logits, 50.0, top_k=1, dtype=dtype) == warp_row(logits, 0.0, dtype=dtype) == [0, 1, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_switch_a_filter_off_keep_everything(dtype: torch.dtype) -> None:
    logits = torch.linspace(0, 40, 3000)  # probabilities down to 1e-18: less than any tolerance
    plain = warp_row(logits, dtype=dtype)
    assert warp_row(logits, top_k=0, top_p=1.0, min_p=0.0, dtype=dtype) == plain
    assert warp_row(logits, top_k=3000, dtype=dtype) == pytest.approx(plain, rel=1e-5)
    assert warp_row(logits, top_k=99999, dtype=dtype) == pytest.approx(plain, rel=1e-5)
    assert min(warp_row(logits, top_k=3000, dtype=dtype)) > 0


def test_the_smallest_top_p_keeps_one_token() -> None:
    assert warp_row(logs([0.2, 0.5, 0.3]), top_p=1e-9) == [0, 1, 0]


@pytest.mark.parametrize("vocab_size", [40, 1024, 1025, 3000])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_filters_against_plain_python(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # Multiples of 1/4 put ties everywhere.
    logits = (spread * 4 * torch.randn(12, 2, vocab_size, generator=generator, dtype=torch.float64)).round() / 4
    params = [
        (1.0, 0, 1.0, 0.0), (0.7, 1, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 511, 1.0, 0.0), (1.0, 512, 0.9, 0.0),
        (1.3, 513, 0.9, 0.0), (1.3, 0, 0.5, 0.0), (1.0, 0, 0.95, 0.0), (2.0, 0, 0.999, 0.3), (0.0, 3, 0.5, 0.5),
        (1.0, 0, 1.0, 0.2), (1.0, 2900, 0.999999, 0.0),
    ]  # fmt: skip
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*params, strict=True)]
    warped = warp(logits, columns[0], columns[1].to(torch.int64), columns[2], columns[3])
    for row, row_params in enumerate(params):
        for i in range(2):
            expected = reference_warp(logits[row, i].tolist(), *row_params)
            assert warped[row, i].tolist() == pytest.approx(expected, rel=1e-9, abs=0), row_params


def test_leading_tokens_settle_what_sorting_decides() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (8 * torch.randn(40, 3000, generator=generator)).round() / 4
    probs = torch.softmax(logits, -1)
    top_k = torch.randint(0, 700, (40,), generator=generator) * (torch.rand(40, generator=generator) < 0.7)
    top_p = torch.rand(40, generator=generator, dtype=torch.float64).clamp(min=0.3)
    top_p[::3] = 1.0
    keep, is_settled = _keep_by_leading(logits, probs, top_k, top_p)
    assert 0 < is_settled.sum() < 40
    assert torch.equal(keep[is_settled], _keep_by_sorting(logits, probs, top_k, top_p)[is_settled])


def test_rows_without_meaning_leave_the_others_alone() -> None:
    logits = torch.randn(4, 2, 2000, generator=torch.Generator().manual_seed(4))
    temperature = torch.tensor([0.7, 0.7, 0.0, 1.0], dtype=torch.float64)
    arguments = (torch.tensor([5, 0, 0, 900]), torch.tensor([0.9, 0.8, 1.0, 1.0]), torch.tensor([0.0, 0.1, 0.0, 0.0]))
    expected = warp(logits, temperature, *arguments)
    logits[1, 0], logits[2, 1], logits[0, 1] = torch.nan, torch.inf, -torch.inf
    warped = warp(logits, temperature, *arguments)
    for row in [(0, 0), (1, 1), (2, 0), (3, 0), (3, 1)]:
        assert torch.equal(warped[row], expected[row])


# Penalties


def penalties_of(params: SamplingParams, prompt: list[int], output: list[int], vocab_size: int = 5) -> Penalties:
    penalties = Penalties.of([params], [prompt], [output], vocab_size, "cpu")
    assert penalties is not None
    return penalties


NOTHING = torch.empty(1, 0, dtype=torch.int64)


def test_no_penalty_needs_nothing() -> None:
    assert Penalties.of([SamplingParams(), SamplingParams(temperature=0.5)], [[1], [2]], [[], [3]], 5, "cpu") is None


def test_repetition_looks_at_prompt_and_output_the_others_at_the_output() -> None:
    logits = torch.tensor([[[2.0, -2.0, 2.0, -2.0, 1.0]]], dtype=torch.float64)
    repetition = penalties_of(SamplingParams(repetition_penalty=2.0), [0, 1], [2, 3, 3])
    assert penalise(logits, repetition, NOTHING)[0, 0].tolist() == [1.0, -4.0, 1.0, -4.0, 1.0]
    frequency = penalties_of(SamplingParams(frequency_penalty=0.5), [0, 1], [2, 3, 3])
    assert penalise(logits, frequency, NOTHING)[0, 0].tolist() == [2.0, -2.0, 1.5, -3.0, 1.0]
    presence = penalties_of(SamplingParams(presence_penalty=0.5), [0, 1], [2, 3, 3])
    assert penalise(logits, presence, NOTHING)[0, 0].tolist() == [2.0, -2.0, 1.5, -2.5, 1.0]


def test_bias_is_added_last() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0, 4: -1.0})
    logits = torch.tensor([[[2.0, 0.0, 0.0, 0.0, 1.0], [4.0, 0.0, 0.0, 0.0, 1.0]]])
    penalised = penalise(logits, penalties_of(params, [0], []), torch.tensor([[1]]))
    assert penalised.tolist() == [[[4.0, 0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0, 0.0]]]
    assert logits[0, 0].tolist() == [2.0, 0.0, 0.0, 0.0, 1.0]


def test_each_row_sees_the_drafts_before_it() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    penalties = penalties_of(params, [4], [0])
    # Three rows behind three known drafts [2, 2, 1]: they follow 1, 2 and 3 of them.
    penalised = penalise(torch.zeros(1, 3, 5), penalties, torch.tensor([[2, 2, 1]]))
    assert penalised[0].tolist() == [[-1, 0, -1, 0, 0], [-1, 0, -2, 0, 0], [-1, -1, -2, 0, 0]]
    # Rows 0 .. K of a verification: A = K, Q = K + 1. Padding is no token.
    penalised = penalise(torch.zeros(1, 3, 5), penalties, torch.tensor([[2, -1]]))
    assert penalised[0].tolist() == [[-1, 0, 0, 0, 0], [-1, 0, -1, 0, 0], [-1, 0, -1, 0, 0]]


def test_extending_equals_starting_over() -> None:
    params = [SamplingParams(frequency_penalty=1.0, presence_penalty=0.3), SamplingParams(repetition_penalty=1.4)]
    started = Penalties.of(params, [[0, 1], [2]], [[3], []], 5, "cpu")
    assert started is not None
    before = started.output_counts.clone()
    extended = started.extend(torch.tensor([[3, 3, 1], [4, -1, -1]]))
    over = Penalties.of(params, [[0, 1], [2]], [[3, 3, 3, 1], [4]], 5, "cpu")
    assert over is not None
    assert torch.equal(started.output_counts, before)
    assert torch.equal(extended.output_counts, over.output_counts)
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(5))
    drafts = torch.tensor([[1, 2], [0, -1]])
    assert torch.equal(penalise(logits, extended, drafts), penalise(logits, over, drafts))


def test_a_request_without_penalties_keeps_its_bits_beside_one_with_all() -> None:
    params = [SamplingParams(), SamplingParams(1.0, 0, 1.0, 0.0, 1.3, 0.4, 0.2, {1: 2.0})]
    penalties = Penalties.of(params, [[0, 1, 2], [2]], [[3, 3], [1]], 5, "cpu")
    assert penalties is not None
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(6))
    penalised = penalise(logits, penalties, torch.tensor([[1, 2], [0, 3]]))
    assert torch.equal(penalised[0], logits[0])
    alone = penalise(logits[1:], penalties_of(params[1], [2], [1]), torch.tensor([[0, 3]]))
    assert torch.equal(penalised[1:], alone)


def test_masked_logits_stay_masked_and_foreign_ids_are_not_counted() -> None:
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5)
    penalties = penalties_of(params, [0, 9], [0, 7])
    penalised = penalise(torch.tensor([[[-math.inf, 1.0, 1.0, 1.0, 1.0]]]), penalties, torch.tensor([[8]])[:, :0])
    assert penalised[0, 0].tolist() == [-math.inf, 1.0, 1.0, 1.0, 1.0]
    assert torch.equal(penalties.extend(torch.tensor([[5, -1]])).output_counts, penalties.output_counts)
