"""The pretended device (`helpers.pretend_gpu`) refuses and counts what a real one does."""

import numpy
import pytest
import torch
from torch.nn import functional

from spectoolkit.functional.ragged import to_device
from tests.helpers.pretend_gpu import DEVICE, pretend_gpu, to_gpu

HOST = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def waits():
    with torch.inference_mode(), pretend_gpu() as noted:
        yield noted.at


@pytest.fixture
def values(waits):
    made = to_device(HOST, DEVICE)
    assert not waits
    return made


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 3).any()),
    "int": lambda x: int(x[0, 1]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "copy to the host": lambda x: torch.zeros(2, 3).copy_(x),
    "copy from the host": lambda x: x.copy_(HOST),
    "not pinned": lambda x: HOST.to(x.device, non_blocking=True),
    "pinned but blocking": lambda x: HOST.pin_memory().to(x.device),
    "numbers": lambda x: torch.tensor([1, 2], device=x.device),
    "mask": lambda x: x[x > 3],
    "assigned by a mask": lambda x: x.__setitem__(x > 3, x.new_zeros(2)),
    "index on the host": lambda x: x[torch.tensor([1, 0])],
    "list": lambda x: x[[1, 0]],
    "nonzero": lambda x: x.nonzero(),
    "nonzero of each axis": lambda x: x.nonzero(as_tuple=True),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 3),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeated by numbers of the device": lambda x: x[0].repeat_interleave(x[0].long()),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_makes_the_host_wait(name, waits, values):
    WAITING[name](values)
    assert len(waits) == 1, waits
    assert "test_pretend_gpu" in waits[0]


def test_what_does_not(waits, values):
    places = torch.arange(2, device=DEVICE)
    values[places, places] = 7.0
    values[values > 3] = 0
    values[:, 1] = 2.5
    values.masked_fill_(values > 3, 1)
    torch.where(values > 1, values, 0).sort(dim=-1, stable=True)
    torch.cat([values, values.new_zeros(1, 3), torch.full((1, 3), 2.0, device="cuda")])
    values.repeat_interleave(2, 0).to(torch.float64).to(DEVICE).softmax(-1).cumsum(-1)
    functional.scaled_dot_product_attention(values[None], values[None], values[None])
    functional.linear(values, values) @ values
    to_device(torch.tensor([1]), DEVICE)
    assert values.device == DEVICE
    assert values.is_cuda
    assert not waits


MIXED = {
    "sum": lambda x: x + HOST,
    "cat": lambda x: torch.cat([x, HOST]),
    "gather": lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.int64)),
    "index of the device": lambda x: HOST[x[0].long()],
    "values of the host": lambda x: x.__setitem__(x[0, :2].long(), HOST),
    "in place on the host": lambda x: HOST.clone().add_(x),
    "number of the host": lambda x: x.index_copy(0, torch.tensor(1), x[0]),
    "where": lambda x: torch.where(HOST > 1, x, 0),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_both_places_are_refused(name, values):
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        MIXED[name](values)


def test_numbers_of_the_host_are_not(values):
    assert (values * torch.tensor(2.0)).cpu().tolist() == (HOST * 2).tolist()


def test_numpy_is_refused(values):
    with pytest.raises(TypeError):
        numpy.asarray(values)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_views_and_changes_in_place(mode):
    with mode(), pretend_gpu():
        moved = to_device(HOST, DEVICE)
        row = moved[1]
        row[0] = 9.0
        assert row.add_(1) is row
        assert moved.cpu().tolist() == [[0, 1, 2], [10, 5, 6]]
    assert HOST[1, 0] == 3


def test_a_module():
    layer = torch.nn.Linear(3, 2)
    expected = layer(HOST)
    with torch.no_grad(), pretend_gpu() as waits:
        found = to_gpu(layer)(HOST.to("cuda"))
        assert next(layer.parameters()).device == DEVICE
        torch.testing.assert_close(found.cpu(), expected.detach())
    assert len(waits.at) == 2
