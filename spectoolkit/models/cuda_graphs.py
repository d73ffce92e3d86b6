"""Forward passes of one shape, captured once as a CUDA graph and replayed: one launch for the host to make.

A step of the loop launches hundreds of small kernels, and on a GPU the host is the slower side. In a graph nothing may
depend on the host: shapes, addresses and every number that Python computed stay as they were at capture. So a captured
forward pass takes the lengths of the rows from the device, sees a fixed number of slots and always has a mask
(`RaggedCache.extend`); and it is captured for the buffers that it writes to, and forgotten when they move.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from spectoolkit.errors import UsageError
from spectoolkit.provenance import NUM, note

SWITCH = ("auto", "off")

# Steps in which a shape comes eagerly before it is captured: capturing takes longer than some forward passes.
_EAGER_STEPS = 2

# Of one state. The least recently used one goes first; each holds what it gives out, [B, Q, V] of logits among it.
_MAX_GRAPHS = 8

# Forward passes before a capture, so that nothing is left to be set up in it. torch's own wrapper makes as many.
_NUM_WARM_UPS = 3

_log = logging.getLogger(__name__)

Forward = Callable[..., tuple[Tensor, ...]]


class Graph(Protocol):
    """A captured forward pass."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What it gave."""
        ...

    def replay(self) -> None:
        """Compute the outputs anew, in place, from what the inputs hold by now."""
        ...


Capture = Callable[[Callable[[], tuple[Tensor, ...]]], Graph]
"""Makes a graph of a function that reads its inputs where they lie. It may call it several times."""


class Graphs:
    """Whether and how the forward passes of one model are captured.

    Attributes:
        switch: "auto" (on a GPU) or "off".
        capture: what makes a graph; None where every forward pass is eager.

    Raises:
        UsageError: another switch.
    """

    def __init__(self, switch: str | bool, device: torch.device, name: str) -> None:
        self.switch = parse_switch(switch)
        self.capture: Capture | None = CudaCapture(device) if switch == "auto" and device.type == "cuda" else None
        self._name = name
        self._without = f"none ({device.type.upper()})" if self.switch == "auto" else f"{name}: off"

    def note_pass(self, num_captures: int = 0) -> None:
        """Have `provenance` say how forward passes are made here, as one is, and how many were captured."""
        is_on = self.capture is not None
        note("graphs", f"{self._name}: captured {NUM} forward passes" if is_on else self._without, num_captures)

    def give_up(self, error: Exception) -> None:
        """Stay eager from now on; said once, since `capture` is None afterwards."""
        self.capture = None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self._without = f"{self._name}: eager, because a forward pass could not be captured: {reason}"
        _log.warning("%s runs without CUDA graphs, since a forward pass could not be captured: %s", self._name, reason)


def parse_switch(graphs: str | bool) -> str:
    """The switch called `graphs`. Raises `UsageError` if there is none."""
    if graphs is False:  # what YAML makes of a bare off
        return "off"
    if graphs not in SWITCH:
        raise UsageError(f"graphs: expected {' or '.join(SWITCH)}, got {graphs!r}")
    return str(graphs)


@dataclass(frozen=True)
class _Captured:
    inputs: tuple[Tensor, ...]
    graph: Graph

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given)
        self.graph.replay()
        # Copied, because the next replay writes over them, and callers may keep what they were given: one read and
        # write of the logits, beside a forward pass that made them.
        return tuple(output.clone() for output in self.graph.outputs)


class GraphedForwards:
    """The captured forward passes of one state."""

    def __init__(self) -> None:
        self._forget([])

    def _forget(self, buffers: list[Tensor]) -> None:
        """Begin anew, with these buffers."""
        self._buffers = buffers
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._steps: defaultdict[Hashable, set[int]] = defaultdict(set)

    def run(
        self,
        graphs: Graphs,
        shape: Hashable,
        step: int,
        buffers: list[Tensor],
        inputs: Sequence[Tensor],
        forward: Forward,
    ) -> tuple[Tensor, ...] | None:
        """What `forward(*inputs)` gives, by a replay; None if the caller is to compute it eagerly.

        Args:
            shape: everything about the pass that is fixed; equal shapes are the same graph.
            step: number of the step in the state's life. Passes of one step count once, so that states that live for
                one step (those of chains) are never captured, however many passes the step has.
            buffers: what `forward` writes to besides its outputs. Doing so twice must change nothing.
            inputs: whose contents, and not whose addresses, may differ between calls of equal shapes.
        """
        if graphs.capture is None:
            return None
        if len(buffers) != len(self._buffers) or any(a is not b for a, b in zip(buffers, self._buffers, strict=True)):
            self._forget(buffers)
        captured = self._graphs.get(shape)
        if captured is None:
            steps = self._steps[shape]
            steps.add(step)
            if len(steps) <= _EAGER_STEPS:
                return None
            captured = _capture(graphs, inputs, forward)
            if captured is None:
                self._forget([])
                return None
            graphs.note_pass(num_captures=1)
            self._graphs[shape] = captured
            if len(self._graphs) > _MAX_GRAPHS:
                oldest, _ = self._graphs.popitem(last=False)
                del self._steps[oldest]
        self._graphs.move_to_end(shape)
        return captured(inputs)


def _capture(graphs: Graphs, inputs: Sequence[Tensor], forward: Forward) -> _Captured | None:
    assert graphs.capture is not None
    static = tuple(given.clone(memory_format=torch.contiguous_format) for given in inputs)
    try:
        return _Captured(static, graphs.capture(lambda: forward(*static)))
    except Exception as error:  # whatever it is: the eager pass gives the same numbers, or raises it again
        graphs.give_up(error)
        return None


class CudaCapture:
    """Captures on `device`; all graphs share one memory pool, since none is replayed while another one is.

    As torch's notes on CUDA graphs ask for: warm-up on a side stream, which is the one that is captured; inputs that
    stay where they are; no synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, forward: Callable[[], tuple[Tensor, ...]]) -> Graph:
        with torch.cuda.device(self._device):
            pool, stream = self._pool_and_stream[:2]
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(_NUM_WARM_UPS - 1):
                        forward()
                    with _refusing_synchronisation():  # a capture that fails half-way is harder to clean up after
                        forward()
            finally:
                current.wait_stream(stream)
            return _captured(forward, pool, stream)

    @functools.cached_property
    def _pool_and_stream(self) -> tuple[Any, Any, Graph]:
        """Of all captures. A pool goes with its last graph, and its handle is of no use then: so one graph stays."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        scratch = torch.zeros(1, device=self._device).add_(1)
        return pool, stream, _captured(lambda: (scratch.add_(1),), pool, stream)


def _captured(forward: Callable[[], tuple[Tensor, ...]], pool: Any, stream: Any) -> Graph:
    current = torch.cuda.current_stream()
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = forward()
    finally:
        torch.cuda.set_stream(current)  # `torch.cuda.graph` stays on its own where the capture failed
    return _CudaGraph(graph, outputs)


@dataclass(frozen=True)
class _CudaGraph:
    graph: Any
    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        self.graph.replay()


@contextlib.contextmanager
def _refusing_synchronisation() -> Iterator[None]:
    """Have the device's functions that make the host wait raise RuntimeError instead."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that this mode does not find them all
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
