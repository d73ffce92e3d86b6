"""A GPU without a GPU: tensors that say they are on one, are computed on the CPU, and note when the host would wait.

What does not work on a GPU does not work here: tensors of both places in one operation. What makes the host wait for
everything that was given to the device before is counted, as torch does it (`c10::cuda::memcpy_and_sync`, which
`torch.cuda.set_sync_debug_mode` reports): numbers read back, copies unless they are `non_blocking` and from or to
pinned memory, and operations whose result has a size that only the device knows. An index on the host is copied, so it
counts. Kernels, streams, memory and the rounding of a GPU are not here.

The C++ side takes these tensors for those of a CPU, as torch without CUDA refuses others; so everything that asks for
their place from Python goes through `_Functions`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spectoolkit.functional import draw, noise
from spectoolkit.functional.ragged import filled, places

DEVICE = torch.device("cuda", 0)

# Operations after which the host knows something that was computed on the device: a number, or the size of a result.
_READ_BACK = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "histc", "one_hot", "multinomial",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# These ask for one device even of tensors without dimensions, which others take from the host as numbers.
_STRICT = {
    "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select", "index_copy", "index_copy_",
    "index_add", "index_add_", "cat", "stack", "embedding", "searchsorted", "bucketize",
}  # fmt: skip


@dataclass
class Waits:
    """Where the host waited.

    Attributes:
        at: a line each, "function (file): operation", the function being the innermost one of the toolkit.
    """

    at: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.at.append(f"{_caller()}: {what}")


_waits = Waits()


def _caller() -> str:
    frame = sys._getframe(1)
    outermost = None
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("spectoolkit"):
            return f"{frame.f_code.co_qualname} ({name.removeprefix('spectoolkit.')})"
        if name.startswith("tests") and name != __name__ and outermost is None:
            outermost = f"{frame.f_code.co_name} ({name})"
        frame = frame.f_back
    return outermost or "?"


class PretendTensor(Tensor):
    """A tensor "on the GPU"; `inner` is the same on the CPU, and views of one are views of the other."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        assert type(inner) is not PretendTensor
        with torch.inference_mode(inner.is_inference()):  # a view of a tensor made outside that mode is none of it
            made = Tensor._make_wrapper_subclass(
                cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
            )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"on the device: {self.inner!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        given = {id(one.inner): one for one in tensors if isinstance(one, PretendTensor)}
        hosts = [one for one in tensors if not isinstance(one, PretendTensor)]
        if name == "copy_":
            return _copied(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        if name in _INDEXING:
            _check_indexing(name, args, kwargs)
        else:
            if any(host.dim() or name in _STRICT for host in hosts):
                raise RuntimeError(_mixed(func, tensors))
            sized = name == "repeat_interleave" and kwargs.get("output_size") is None
            if name in _READ_BACK or (sized and any(isinstance(a, Tensor) for a in args[1:])):
                _waits.note(name)
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], PretendTensor):
            raise RuntimeError(_mixed(func, tensors))
        device = kwargs.get("device")
        assert device is None or device.type == "cpu", f"{func}: expected no device here, got {device}"
        found = func(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})
        return _pretended(found, given)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _plain(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.inner
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _pretended(found: Any, given: dict[int, PretendTensor]) -> Any:
    if isinstance(found, Tensor):  # what was changed in place is still itself
        return given[id(found)] if id(found) in given else PretendTensor(found)
    return type(found)(_pretended(part, given) for part in found) if isinstance(found, (list, tuple)) else found


def _mixed(func: Any, tensors: Iterable[Tensor]) -> str:
    where = [f"{one.device.type}{list(one.shape)}" for one in tensors]
    return f"Expected all tensors to be on the same device, but {func} was given {', '.join(where)}"


def _check_indexing(name: str, args: Any, kwargs: Any) -> None:
    source, indices, *rest = args
    indices = [index for index in indices if index is not None]
    if not isinstance(source, PretendTensor):
        raise RuntimeError(f"indices should be on the host as the indexed tensor is, but {name} was given others")
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    value = rest[0] if rest else None
    if isinstance(value, Tensor) and not isinstance(value, PretendTensor):
        if value.dim():
            raise RuntimeError(_mixed(name, [source, value]))
        _waits.note(f"{name} of a value on the host")
    for index in indices:
        if not isinstance(index, PretendTensor):
            _waits.note(f"{name} by an index on the host")
    is_filling = value is not None and value.numel() == 1 and not (rest[1:] and rest[1]) and len(masks) == len(indices)
    if masks and not is_filling:  # a masked fill does not count
        _waits.note(f"{name} by a mask")


def _copied(into: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    _note_copy(source, into, non_blocking)
    plain = [one.inner if isinstance(one, PretendTensor) else one for one in (into, source)]
    plain[0].copy_(plain[1])
    return into


def _note_copy(source: Tensor, into: Tensor | None, non_blocking: bool) -> None:
    """Note a copy between host and device; `into` is None for a new tensor on the other side."""
    is_from_device = isinstance(source, PretendTensor)
    if into is not None and is_from_device == isinstance(into, PretendTensor):
        return
    if is_from_device:
        assert not non_blocking, "a copy to the host that nobody waits for may be read before it is there"
        _waits.note("copy to the host")
    elif not (non_blocking and getattr(source, "is_pretended_pinned", False)):
        _waits.note("copy to the device" + (" of memory that is not pinned" if non_blocking else ""))


class _Functions(TorchFunctionMode):
    """Calls from Python that say or ask where a tensor is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda") and args and isinstance(args[0], Tensor):
            return _moved(func, name, *args, **kwargs)
        if name in ("tolist", "numpy", "__array__") and isinstance(args[0], PretendTensor):
            if name != "tolist":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            _waits.note("tolist")
            return args[0].inner.tolist()
        if name == "pin_memory":
            if isinstance(args[0], PretendTensor):
                raise RuntimeError("cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned")
            pinned = args[0].clone()
            pinned.is_pretended_pinned = True
            return pinned
        if func is Tensor.__setitem__ and isinstance(args[0], PretendTensor) and not isinstance(args[2], Tensor):
            args = (*args[:2], PretendTensor(torch.tensor(args[2], dtype=args[0].dtype)))
        device = kwargs.get("device")
        if isinstance(device, str):
            device = torch.device(device)
        if device is None:
            return func(*args, **kwargs)
        if device.type != "cuda":
            assert not (args and isinstance(args[0], PretendTensor)), f"{name}: a new tensor elsewhere"
            return func(*args, **kwargs)
        del kwargs["device"]
        if name in ("tensor", "as_tensor", "new_tensor"):  # of Python numbers, or of a tensor
            made = func(*args, **kwargs)
            if isinstance(made, PretendTensor):
                return made
            _note_copy(made, None, False)
            return PretendTensor(made)
        made = func(*args, **kwargs)  # zeros, arange, new_full, full_like, ...: filled by a kernel
        return made if isinstance(made, PretendTensor) else PretendTensor(made)


def _moved(func: Any, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, `.cpu` and `.cuda`."""
    non_blocking = bool(kwargs.pop("non_blocking", False))
    device, rest = kwargs.pop("device", None), list(args)
    if name != "to":
        device = torch.device(name)
    elif rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, rest = other.device, [other.dtype, *rest]
    elif rest and isinstance(rest[0], (str, torch.device)):
        device = rest.pop(0)
    assert len(rest) <= 1, "non_blocking is expected by name"
    device = tensor.device if device is None else torch.device(device)
    if device.type == tensor.device.type:
        return Tensor.to(tensor, *rest, **kwargs)
    _note_copy(tensor, None, non_blocking)
    if isinstance(tensor, PretendTensor):
        return Tensor.to(tensor.inner, *rest, **{**kwargs, "copy": True})
    return PretendTensor(Tensor.to(tensor, *rest, **{**kwargs, "copy": True}))


class _Event:
    """As `torch.cuda.Event`, with times that say which one came first."""

    count = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self._at: int | None = None

    def record(self, stream: Any = None) -> None:
        _Event.count += 1
        self._at = _Event.count

    def synchronize(self) -> None:
        _waits.note("Event.synchronize")

    def elapsed_time(self, end: _Event) -> float:
        assert self._at is not None
        assert end._at is not None
        return float(end._at - self._at)


def _forget_shared() -> None:
    """These keep tensors of a device."""
    places.cache_clear()
    filled.cache_clear()


@contextlib.contextmanager
def pretend_gpu() -> Iterator[Waits]:
    """Inside, `cuda` is a device. Gives the waits so far."""
    _waits.at.clear()
    _forget_shared()
    stands_in = {
        "Event": _Event,
        "current_stream": lambda device=None: None,
        "synchronize": lambda device=None: _waits.note("synchronize"),
    }
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(torch.cuda, **stands_in))
            stack.enter_context(mock.patch.dict("os.environ", SPECTOOLKIT_KERNELS="off"))
            for module in (draw, noise):  # a mode counts as an override there; these tensors have none
                stack.enter_context(mock.patch.object(module, "has_torch_function_unary", return_value=False))
            stack.enter_context(_Functions())
            yield _waits
    finally:
        _forget_shared()


def to_gpu(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers, in place."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, PretendTensor):
                    tensors[name] = PretendTensor(tensor.detach())
    return module
