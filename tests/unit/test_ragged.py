import torch

from spectoolkit.functional.ragged import (
    few_ints,
    fit_vocabulary,
    ints,
    pad_rows,
    places,
    put_rows,
    row_lengths,
    to_device,
    unpad_rows,
)

CPU = torch.device("cpu")


def test_pad_rows_and_lengths():
    rows = pad_rows([[1, 2, 3], [], [0]])
    assert rows.tolist() == [[1, 2, 3], [-1, -1, -1], [0, -1, -1]]
    assert row_lengths(rows).tolist() == [3, 0, 1]
    assert unpad_rows(rows) == [[1, 2, 3], [], [0]]
    assert pad_rows([]).shape == (0, 0)
    assert pad_rows([[], []]).shape == (2, 0)


def test_places_are_made_once_and_may_take_part_in_gradients():
    with torch.inference_mode():
        found = places(5, CPU)
    assert places(5, CPU) is found
    assert found.tolist() == [0, 1, 2, 3, 4]
    weights = torch.ones(5, requires_grad=True)
    (weights[found] * 2).sum().backward()
    assert weights.grad is not None


def test_numbers_that_are_all_the_same_share_a_tensor():
    with torch.inference_mode():
        found = few_ints([4, 4, 4], CPU)
    assert few_ints((4, 4, 4), CPU) is found
    assert not found.is_inference()
    for values in ([4, 4, 4], [4, 3, 4], [4], []):
        assert torch.equal(few_ints(values, CPU), ints(values))
        assert few_ints(values, CPU).dtype == ints(values).dtype == torch.int64


def test_fit_vocabulary():
    rows = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(rows, 3, 0.0) is rows
    assert fit_vocabulary(rows, 2, 0.0).tolist() == [[1, 2]]
    assert fit_vocabulary(rows, 5, -torch.inf).tolist() == [[1, 2, 3, -torch.inf, -torch.inf]]


def test_on_a_cpu_nothing_is_copied():
    values = torch.arange(3)
    assert to_device(values, CPU) is values


def test_put_rows_copies():
    rows = pad_rows([[1], [2], [3]])
    assert put_rows(rows, [2, 0], pad_rows([[8], [9]])).tolist() == [[9], [2], [8]]
    assert rows.tolist() == [[1], [2], [3]]
