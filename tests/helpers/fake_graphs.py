"""Graphs without a GPU: the operations of a forward pass are noted at capture, and repeated on the same tensors.

As in a CUDA graph, no Python runs in a replay: what the host computed stays as it was at capture, and what was written
is found where it was then. So a forward pass that depends on the host gives wrong numbers here too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectoolkit.models.cuda_graphs import Graph

# What makes the host wait for a device, or copies from it.
SYNCHRONISING = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "nonzero", "unique", "unique_consecutive", "masked_select", "equal", "allclose", "is_nonzero",
}  # fmt: skip


class _Refusing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in SYNCHRONISING:
            raise RuntimeError(f"{func.__name__} makes the host wait")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            for index in tree_leaves(args[1]):
                if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                    raise RuntimeError("indexing by a mask makes the host wait")
        if func is torch.tensor and (kwargs or {}).get("device") is not None:
            raise RuntimeError("a tensor made of Python numbers is copied to the device")
        return func(*args, **(kwargs or {}))


class _Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number is read back from the device")
        given = func(*args, **kwargs)
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        # Of views and in-place operations nothing is left to be copied at replay.
        new = [
            (place, t)
            for place, t in enumerate(tree_leaves(given))
            if isinstance(t, Tensor) and t.numel() and t.untyped_storage().data_ptr() not in before
        ]
        self.calls.append((func, args, kwargs, new))
        return given


class FakeGraph:
    def __init__(self, forward: Callable[[], tuple[Tensor, ...]], capture: FakeCapture) -> None:
        forward()  # warm-up
        noting = _Noting()
        with _Refusing(), noting:
            self.outputs = forward()
        self._calls, self._capture = noting.calls, capture
        for output in self.outputs:
            output.fill_(torch.nan)  # capturing computes nothing

    def replay(self) -> None:
        self._capture.num_replays += 1
        for graph in self._capture.graphs:  # whatever graphs gave before may be gone: they share their memory
            for output in graph.outputs:
                output.fill_(torch.nan)
        for func, args, kwargs, new in self._calls:
            leaves = tree_leaves(func(*args, **kwargs))
            for place, tensor in new:
                assert leaves[place].shape == tensor.shape
                tensor.copy_(leaves[place])


class FakeCapture:
    """A `cuda_graphs.Capture` on the CPU.

    Attributes:
        graphs: those that were made.
        num_replays: of all of them.
    """

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.num_replays = 0

    def __call__(self, forward: Callable[[], tuple[Tensor, ...]]) -> Graph:
        self.graphs.append(FakeGraph(forward, self))
        return self.graphs[-1]


def graphed(*models) -> FakeCapture:
    """Have these models replay their forward passes (in place); counts of all of them."""
    capture = FakeCapture()
    for model in models:
        model.graphs.capture = capture
    return capture
