import torch

from spectoolkit.functional.ragged import pad_rows, places, put_rows, row_lengths, to_device


def test_pad_rows_and_lengths():
    rows = pad_rows([[1, 2, 3], [], [0]])
    assert rows.tolist() == [[1, 2, 3], [-1, -1, -1], [0, -1, -1]]
    assert row_lengths(rows).tolist() == [3, 0, 1]
    assert pad_rows([]).shape == (0, 0)
    assert pad_rows([[], []]).shape == (2, 0)


def test_places_are_made_once_and_may_take_part_in_gradients():
    device = torch.device("cpu")
    with torch.inference_mode():
        found = places(5, device)
    assert places(5, device) is found
    assert found.tolist() == [0, 1, 2, 3, 4]
    weights = torch.ones(5, requires_grad=True)
    (weights[found] * 2).sum().backward()
    assert weights.grad is not None


def test_on_a_cpu_nothing_is_copied():
    values = torch.arange(3)
    assert to_device(values, torch.device("cpu")) is values


def test_put_rows_copies():
    rows = pad_rows([[1], [2], [3]])
    assert put_rows(rows, [2, 0], pad_rows([[8], [9]])).tolist() == [[9], [2], [8]]
    assert rows.tolist() == [[1], [2], [3]]
