"""Uniform numbers that remember what they are compared with, so that a rule can be integrated without knowing it.

A rule reads its randomness by comparing it: u q(x) < p(x), u < h, F(x) > u F(V - 1). `Traced` numbers stand for the
uniforms of a batch; the drafter's and the verifier's own code runs on them. Each is a u + b for one uniform u, and
every comparison with a plain number c leaves the cut (c - b) / a behind. Where no cut falls into a box of uniforms,
every comparison has one outcome on it, and so has what follows: the emitted tokens are constant on the box.

Any operation whose effect on the cuts is not known is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from spectoolkit.errors import ContractError
from spectoolkit.functional.draw import gumbel_max
from spectoolkit.functional.noise import position_uniforms

MOST_VARIABLES = 1 << 20
"""Uniforms that one row may read; a source is row * MOST_VARIABLES + variable."""

_PARTS = ("numbers", "source", "scale", "shift")
_Parts = tuple[Tensor, Tensor, Tensor, Tensor]
_PROPERTIES = ("shape", "dtype", "device", "ndim")
_PLAIN = ("size", "dim", "numel", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
          "zeros_like", "ones_like", "full_like", "empty_like")  # fmt: skip
_MOVING = ("getitem", "reshape", "view", "expand", "expand_as", "squeeze", "unsqueeze", "clone", "contiguous",
           "flatten", "unflatten", "permute", "transpose", "gather", "index_select", "take_along_dim", "split", "chunk",
           "unbind", "select", "narrow", "flip", "roll", "repeat", "repeat_interleave", "detach")  # fmt: skip
_COMPARING = ("lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal")


class UntraceableError(ContractError):
    """A drafter or verifier does with its noise what the enumeration cannot follow."""


class TooManyTokensError(UntraceableError):
    """Shared noise over a vocabulary of more than two tokens, where it is not a single uniform."""


@dataclass(frozen=True)
class Cuts:
    """The cuts of one comparison.

    Attributes:
        source: [N] which row and variable each is of.
        at: [N] where the comparison changes its outcome, in terms of the uniform.
    """

    source: Tensor
    at: Tensor


class Traced:
    """A tensor of numbers a u + b, each with the uniform u that it comes from; behaves like the tensor of their values.

    Args:
        numbers: their values [...], float64.
        source: [...] int64, row * MOST_VARIABLES + variable.
        scale, shift: a and b [...].
        cuts: where comparisons are noted, in the order of the program.
    """

    def __init__(self, numbers: Tensor, source: Tensor, scale: Tensor, shift: Tensor, cuts: list[Cuts]) -> None:
        self.numbers, self.source, self.scale, self.shift, self.cuts = numbers, source, scale, shift, cuts

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func)).strip("_")
        if name in _PLAIN:
            return func(*_part(args, "numbers"), **kwargs)
        if name in _MOVING:
            return _moved(func, args, kwargs)
        if name == "to" and all(arg in (torch.float64, torch.device("cpu")) for arg in (*args[1:], *kwargs.values())):
            return args[0]
        if name == "double":
            return args[0]
        if name == "pad":
            return _padded(*args, **kwargs)
        if name in ("where", "masked_fill") and len(args) == 3 and not kwargs:
            chosen, one, other = args if name == "where" else (args[1], args[2], args[0])
            lifted = [_lifted(arg, args) for arg in (one, other)]
            return _moved(torch.where, (chosen, *lifted), {})
        if name in ("cat", "stack"):
            return _moved(func, ([_lifted(arg, args[0]) for arg in args[0]], *args[1:]), kwargs)
        if name in _COMPARING and len(args) == 2:
            return _compared(func, args)
        if name in _AFFINE and len(args) == 2 and not kwargs:
            return _AFFINE[name](*args)
        if name == "neg":
            return _times(args[0], -1.0)
        if name == "gumbel_max":
            raise UntraceableError("gumbel_max: expected the keys of the shared noise, got uniforms")
        raise UntraceableError(
            f"{name} of a uniform: the enumeration follows moving, scaling, shifting and comparing uniforms only"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _PROPERTIES:
            return getattr(self.numbers, name)
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: type(self).__torch_function__(
            getattr(torch.Tensor, name), (type(self),), (self, *args), kwargs
        )

    def __getitem__(self, index: Any) -> Any:
        return type(self).__torch_function__(torch.Tensor.__getitem__, (type(self),), (self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        lifted = _lifted(value, [self])
        for part in _PARTS:
            getattr(self, part)[index] = getattr(lifted, part)

    def __len__(self) -> int:
        return len(self.numbers)

    def __bool__(self) -> bool:
        raise UntraceableError("bool of a uniform: the enumeration follows comparisons of tensors only")

    def __eq__(self, other: object) -> Any:
        raise UntraceableError("equality of a uniform: the enumeration follows <, <=, > and >= only")

    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return _times(self, -1.0)

    def __add__(self, other: Any) -> Any:
        return _plus(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _minus(self, other)

    def __rsub__(self, other: Any) -> Any:
        return _minus(other, self)

    def __mul__(self, other: Any) -> Any:
        return _times(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return _over(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _over(other, self)

    def __lt__(self, other: Any) -> Any:
        return _compared(torch.lt, (self, other))

    def __le__(self, other: Any) -> Any:
        return _compared(torch.le, (self, other))

    def __gt__(self, other: Any) -> Any:
        return _compared(torch.gt, (self, other))

    def __ge__(self, other: Any) -> Any:
        return _compared(torch.ge, (self, other))


class TracedKeys(Traced):
    """Keys of shared noise, which can be moved, be drawn with (`functional.draw.gumbel_max`) and give a uniform each.

    With two tokens the noise of a position is one uniform: s = E_1 / (E_0 + E_1) of two standard exponentials is
    uniform, and argmax_x p(x) / E_x = 0 exactly if s > p(1) / (p(0) + p(1)).
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func)).strip("_")
        if func is gumbel_max:
            probs, keys = args
            if probs.shape[-1] != 2:
                raise TooManyTokensError(
                    "shared noise is one uniform for two tokens only, and is enumerated there; "
                    f"got a vocabulary of {probs.shape[-1]}"
                )
            share = probs[..., 1].double() / probs.sum(-1, dtype=torch.float64)
            uniform = Traced(keys.numbers, keys.source, keys.scale, keys.shift, keys.cuts)
            return torch.where(_compared(torch.gt, (uniform, share)), 0, 1)
        if func is position_uniforms:  # no pair reads the same key in both ways
            keys = args[0]
            return Traced(keys.numbers, keys.source, keys.scale, keys.shift, keys.cuts)
        if name in (*_MOVING, *_PLAIN):
            return super().__torch_function__(func, types, args, kwargs)
        raise UntraceableError(f"{name} of a key of shared noise: the enumeration follows drawing with it only")


def _part(value: Any, name: str) -> Any:
    """`value` with every traced tensor in it replaced by one of its parts."""
    if isinstance(value, Traced):
        return getattr(value, name)
    if isinstance(value, (list, tuple)):
        return type(value)(_part(item, name) for item in value)
    return value


def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What only moves numbers moves all their parts alike."""
    found = _first_traced(args)
    parts = [func(*_part(args, name), **_kwargs_part(kwargs, name)) for name in _PARTS]
    if isinstance(parts[0], Tensor):
        return type(found)(*cast(_Parts, parts), found.cuts)
    return type(parts[0])(type(found)(*cast(_Parts, each), found.cuts) for each in zip(*parts, strict=True))


def _kwargs_part(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: _part(value, name) for key, value in kwargs.items()}


def _first_traced(values: Any) -> Traced:
    """The first traced tensor among `values`, which may be nested."""
    for value in values:
        if isinstance(value, Traced):
            return value
        if isinstance(value, (list, tuple)) and any(isinstance(item, Traced) for item in value):
            return _first_traced(value)
    raise UntraceableError("expected a uniform among the arguments, got none")


def _lifted(value: Any, beside: Sequence[Any]) -> Traced:
    """A plain number or tensor as one that no uniform changes."""
    if isinstance(value, Traced):
        return value
    found = _first_traced(beside)
    plain = torch.as_tensor(value, dtype=torch.float64)
    zero = torch.zeros_like(plain)
    return type(found)(plain, torch.zeros_like(plain, dtype=torch.int64), zero, plain, found.cuts)


def _padded(uniform: Traced, width: Sequence[int], mode: str = "constant", value: float | None = None) -> Traced:
    """Numbers with plain ones around them."""
    if mode != "constant":
        raise UntraceableError(f"padding of a uniform in the mode {mode!r}: the enumeration follows constants only")
    source, scale = pad(uniform.source, list(width)), pad(uniform.scale, list(width))
    numbers, shift = (pad(part, list(width), value=value or 0.0) for part in (uniform.numbers, uniform.shift))
    return type(uniform)(numbers, source, scale, shift, uniform.cuts)


def _constant(value: Any) -> Any:
    """The plain value of a tensor that no uniform changes.

    Raises:
        UntraceableError: a uniform changes it.
    """
    if not isinstance(value, Traced):
        return value
    if bool((value.scale != 0).any()):
        raise UntraceableError("two uniforms in one number: the enumeration follows numbers of one uniform only")
    return value.numbers


def _split(one: Any, other: Any) -> tuple[Traced, Any]:
    """The operand with the uniform, and the plain one."""
    if not isinstance(one, Traced) or (isinstance(other, Traced) and not bool((one.scale != 0).any())):
        one, other = other, one
    return one, _constant(other)


def _built(like: Traced, numbers: Tensor, scale: Tensor, shift: Tensor) -> Traced:
    shape = numbers.shape
    return Traced(numbers, like.source.expand(shape), scale.expand(shape), shift.expand(shape), like.cuts)


def _plus(one: Any, other: Any) -> Traced:
    uniform, plain = _split(one, other)
    return _built(uniform, uniform.numbers + plain, uniform.scale, uniform.shift + plain)


def _times(one: Any, other: Any) -> Traced:
    uniform, plain = _split(one, other)
    return _built(uniform, uniform.numbers * plain, uniform.scale * plain, uniform.shift * plain)


def _minus(one: Any, other: Any) -> Traced:
    return _plus(one, _times(other, -1.0) if isinstance(other, Traced) else -other)


def _over(one: Any, other: Any) -> Traced:
    plain = _constant(other)
    if not isinstance(one, Traced):
        raise UntraceableError("division by a uniform: the enumeration follows scaling and shifting only")
    return _built(one, one.numbers / plain, one.scale / plain, one.shift / plain)


def _rsub(one: Any, other: Any) -> Traced:
    return _minus(other, one)


_AFFINE: dict[str, Callable[[Any, Any], Traced]] = {
    "add": _plus, "radd": _plus, "sub": _minus, "subtract": _minus, "rsub": _rsub, "mul": _times, "rmul": _times,
    "multiply": _times, "div": _over, "truediv": _over, "true_divide": _over, "divide": _over,
}  # fmt: skip


def _compared(func: Callable[..., Any], args: Sequence[Any]) -> Tensor:
    """The outcome of a comparison at the numbers' values; notes where it changes."""
    uniform, plain = _split(*args)
    outcome = func(*_part(args, "numbers"))
    scale, shift = uniform.scale.expand(outcome.shape), uniform.shift.expand(outcome.shape)
    at = (plain - shift) / scale
    is_cut = (scale != 0) & at.isfinite()
    uniform.cuts.append(Cuts(uniform.source.expand(outcome.shape)[is_cut], at[is_cut]))
    return outcome
