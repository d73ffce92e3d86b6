"""What a decoding loop asks of its models, noted so that the same calls can be made once more with nothing between.

Two recorders, since engines call models in two ways: `Recorder` for calls of `interfaces.LanguageModel`, which is how
the loop does it, and `ForwardRecorder` for forward passes of transformers models, which is how other engines do it.
Both tell the seconds inside forward passes and the floor: the seconds of the repeated calls.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from spectoolkit.interfaces import LanguageModel
from spectoolkit.laps import Laps

FORWARDS = ("prefill", "score")


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Spans:
    """The time between pairs of marks, without waiting for the device at any of them.

    On a GPU a mark is an event in its queue (`laps`), so a span lasts from when the device reached the first to when it
    reached the second: its own work in between, or the launching of it where that takes longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._laps = Laps(device)
        self.mark = self._laps.mark
        """Begin a span, or end the one that has begun."""

    def seconds(self) -> float:
        """Of all spans together, when all have ended; only here is the device waited for."""
        return sum(self._laps.seconds[::2])


@dataclass
class Recorder:
    """Notes every call to the language models of a run (`RecordedModel`).

    Attributes:
        calls: (model, method, arguments); states are replaced by their number, in the order in which they appeared.
        spans: of the forward passes.
    """

    spans: Spans
    calls: list[tuple[LanguageModel, str, tuple[Any, ...]]] = field(default_factory=list)

    def repeat(self) -> float:
        """Make the same calls in the same order, nothing between them; returns the seconds they take: the floor."""
        states: list[Any] = []
        begin = now(self.calls[0][0].device)
        with torch.inference_mode():
            for model, method, arguments in self.calls:
                given = [states[a.number] if isinstance(a, _State) else a for a in arguments]
                result = getattr(model, method)(*given)
                states.append(result[1] if method == "score" else result)
                for argument in arguments:
                    if isinstance(argument, _State):
                        states[argument.number] = None  # consumed, as in the run itself
        return now(self.calls[0][0].device) - begin


@dataclass(frozen=True)
class _State:
    number: int
    value: Any


class RecordedModel:
    """A language model whose calls go through a `Recorder`."""

    def __init__(self, model: LanguageModel, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self.name, self.vocab_size, self.context_length = model.name, model.vocab_size, model.context_length
        self.device, self.tokenizer = model.device, model.tokenizer

    def prefill(self, prefixes: Sequence[Sequence[int]]) -> _State:
        return self._call("prefill", prefixes)

    def score(self, state: _State, tokens: torch.Tensor) -> tuple[torch.Tensor, _State]:
        return self._call("score", state, tokens)

    def rollback(self, state: _State, lengths: Sequence[int]) -> _State:
        return self._call("rollback", state, lengths)

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return self._call("select", state, rows)

    def insert(self, state: _State, rows: Sequence[int], other: _State) -> _State:
        return self._call("insert", state, rows, other)

    def _call(self, method: str, *arguments: Any) -> Any:
        given = [a.value if isinstance(a, _State) else a for a in arguments]
        if method in FORWARDS:
            self._recorder.spans.mark()
        result = getattr(self._model, method)(*given)
        if method in FORWARDS:
            self._recorder.spans.mark()
        numbered = tuple(_State(a.number, None) if isinstance(a, _State) else a for a in arguments)
        self._recorder.calls.append((self._model, method, numbered))
        number = len(self._recorder.calls) - 1
        return (result[0], _State(number, result[1])) if method == "score" else _State(number, result)


@dataclass(frozen=True)
class _Cache:
    number: int


class ForwardRecorder:
    """Notes forward passes of transformers models, and what is cut off their caches in between (`recorded_forwards`).

    Attributes:
        calls: (model, arguments, keywords, number of the cache that the model makes itself), or (None, cache, arguments
            of its `crop`, None); caches are replaced by their number, in the order in which they appeared.
        spans: of the forward passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.spans = Spans(device)
        self.calls: list[tuple[Any, Any, Any, int | None]] = []
        self._device = device
        self._caches: list[Any] = []  # kept, so that no later object is taken for one of them
        self._fresh: list[Any] = []  # a copy of each as it was before its first forward pass

    def count(self, model: Any) -> int:
        """How many forward passes `model` made."""
        return sum(caller is model for caller, _, _, _ in self.calls)

    def repeat(self) -> float:
        """Make the same calls in the same order, nothing between them; returns the seconds they take: the floor."""
        caches = copy.deepcopy(self._fresh)

        def given(value: Any) -> Any:
            return caches[value.number] if isinstance(value, _Cache) else value

        begin = now(self._device)
        with torch.no_grad():
            for model, first, second, made in self.calls:
                if model is None:
                    caches[first].crop(*second)
                    continue
                output = model(*map(given, first), **{key: given(value) for key, value in second.items()})
                if made is not None:
                    caches[made] = _cache_of(output)
        return now(self._device) - begin

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook: `model` is about to make a forward pass."""
        noted = {key: self._noted(value) for key, value in kwargs.items()}
        self.calls.append((model, tuple(map(self._noted, args)), noted, None))
        self.spans.mark()

    def after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Hook: it has made it; a cache that it was not given is its own."""
        self.spans.mark()
        cache = _cache_of(output)
        if cache is not None and not any(cache is known for known in self._caches):
            self.calls[-1] = (*self.calls[-1][:3], self._add(cache, None))

    def _noted(self, value: Any) -> Any:
        """What stands for an argument among the calls."""
        if not callable(getattr(value, "crop", None)):
            return value
        for number, known in enumerate(self._caches):
            if known is value:
                return _Cache(number)
        return _Cache(self._add(value, copy.deepcopy(value)))

    def _add(self, cache: Any, fresh: Any) -> int:
        number, crop = len(self._caches), cache.crop

        def noted(*args: Any) -> None:
            self.calls.append((None, number, args, None))
            crop(*args)

        cache.crop = noted
        self._caches.append(cache)
        self._fresh.append(fresh)
        return number


def _cache_of(output: Any) -> Any:
    """The cache in a model's output: `cache`, or `past_key_values` as it was called before."""
    return output["cache"] if "cache" in output else output.get("past_key_values")


@contextmanager
def recorded_forwards(models: Sequence[Any], device: torch.device) -> Iterator[ForwardRecorder]:
    """Note every forward pass of these transformers models while the block runs; nothing of them is replaced."""
    recorder = ForwardRecorder(device)
    handles = []
    for model in {id(model): model for model in models}.values():
        handles.append(model.register_forward_pre_hook(recorder.before, with_kwargs=True))
        handles.append(model.register_forward_hook(recorder.after, with_kwargs=True))
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
