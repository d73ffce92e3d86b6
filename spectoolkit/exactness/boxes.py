"""Integrating a program over the uniforms it reads, exactly: the cube of uniforms is cut where the program branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from spectoolkit.exactness.traced import MOST_VARIABLES, Cuts, Traced, TracedKeys, UntraceableError

ROWS_TOGETHER = 8192
MOST_BOXES = 1 << 18
"""Boxes that one integral runs the program on, a few seconds' worth on the toys."""
NEAREST = 2.0**-50
"""A cut nearer than this to another or to the edge of its box counts as the same: what is lost is below the rounding of
the probabilities, and boxes of no width, which differ by rounding alone, do not multiply."""


class Variables:
    """Which uniform is which: equal noise is one variable, wherever and whenever it is read."""

    def __init__(self) -> None:
        self._columns: dict[float | int, int] = {}

    def columns(self, noise: Tensor) -> Tensor:
        """The variable [...] of each number of noise [...]."""
        values, inverse = torch.unique(noise, return_inverse=True)
        new = [self._columns.setdefault(value, len(self._columns)) for value in values.tolist()]
        return torch.tensor(new, dtype=torch.int64)[inverse]

    def __len__(self) -> int:
        return len(self._columns)


class Boxes:
    """Boxes of uniforms, one per row of a batch, on whose middles a program runs.

    Attributes:
        low, high: [B, D] edges; variables from D on range over [0, 1).
    """

    def __init__(self, low: Tensor, high: Tensor, variables: Variables) -> None:
        self.low, self.high = low, high
        self._variables = variables
        self._cuts: list[Cuts] = []

    def __len__(self) -> int:
        return len(self.low)

    def uniforms(self, noise: Tensor) -> Tensor:
        """Traced uniforms in the place of the engine's `noise` [B, ...]; equal noise gives the same uniform."""
        return cast(Tensor, Traced(*self._read(noise), self._cuts))

    def keys(self, noise: Tensor) -> Tensor:
        """Traced keys in the place of the engine's keys of shared noise [B, ...]."""
        return cast(Tensor, TracedKeys(*self._read(noise), self._cuts))

    def _read(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns = self._variables.columns(noise).flatten(1)
        self._widen(len(self._variables))
        numbers = ((self.low + self.high) / 2).gather(1, columns)
        source = torch.arange(len(self))[:, None] * MOST_VARIABLES + columns
        parts = (numbers, source, torch.ones_like(numbers), torch.zeros_like(numbers))
        numbers, source, scale, shift = (part.view(noise.shape) for part in parts)
        return numbers, source, scale, shift

    def _widen(self, num_variables: int) -> None:
        missing = num_variables - self.low.shape[1]
        if missing > 0:
            self.low, self.high = pad(self.low, (0, missing)), pad(self.high, (0, missing), value=1.0)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Cut every box, along the first variable in which a noted cut falls into it.

        Returns:
            [B] which boxes are whole: no comparison changes in them; and edges [M, D] of the parts of the others.
        """
        chosen = torch.full((len(self),), -1, dtype=torch.int64)
        inside: list[tuple[Tensor, Tensor, Tensor]] = []
        for cuts in self._cuts:
            row, variable = cuts.source // MOST_VARIABLES, cuts.source % MOST_VARIABLES
            is_inside = (cuts.at > self.low[row, variable] + NEAREST) & (cuts.at < self.high[row, variable] - NEAREST)
            row, variable, at = row[is_inside], variable[is_inside], cuts.at[is_inside]
            first = torch.full_like(chosen, MOST_VARIABLES).scatter_reduce(0, row, variable, "amin")
            chosen = torch.where((chosen < 0) & (first < MOST_VARIABLES), first, chosen)
            inside.append((row, variable, at))
        is_whole = chosen < 0
        if not inside or bool(is_whole.all()):
            return is_whole, self.low[:0], self.high[:0]
        row, variable, at = (torch.cat(parts) for parts in zip(*inside, strict=True))
        mine = variable == chosen[row]
        row, at = row[mine], at[mine]
        # The parts begin at the box's own edge and at every cut; each ends where the next begins.
        cut_rows = (~is_whole).nonzero()[:, 0]
        row = torch.cat([cut_rows, row])
        begin = torch.cat([self.low[cut_rows, chosen[cut_rows]], at])
        order = begin.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        row, begin = row[order], begin[order]
        is_new = torch.ones_like(row, dtype=torch.bool)
        is_new[1:] = (row[1:] != row[:-1]) | (begin[1:] - begin[:-1] > NEAREST)
        row, begin = row[is_new], begin[is_new]
        is_last = torch.ones_like(row, dtype=torch.bool)
        is_last[:-1] = row[1:] != row[:-1]
        end = torch.where(is_last, self.high[row, chosen[row]], begin.roll(-1))
        low, high = self.low[row], self.high[row]
        low[torch.arange(len(row)), chosen[row]] = begin
        high[torch.arange(len(row)), chosen[row]] = end
        return is_whole, low, high


def integrate(program: Callable[[Boxes], Any]) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Run `program` on boxes that together fill the cube of all uniforms, until its comparisons are constant on each.

    The program sees the uniforms through `Boxes.uniforms` and `Boxes.keys` only, and rows do not depend on each other.

    Returns:
        What it gave for a batch of boxes, which rows [B] of that are final, and the volumes [B] of their boxes.

    Raises:
        UntraceableError: the program branches so often that more than `MOST_BOXES` boxes are needed.
    """
    variables = Variables()
    low, high = torch.zeros(1, 0, dtype=torch.float64), torch.ones(1, 0, dtype=torch.float64)
    num_boxes = 0
    while len(low):
        num_boxes += min(len(low), ROWS_TOGETHER)
        if num_boxes > MOST_BOXES:
            raise UntraceableError(f"more than {MOST_BOXES:,} boxes of uniforms; fewer drafts or chains need less")
        boxes = Boxes(low[-ROWS_TOGETHER:], high[-ROWS_TOGETHER:], variables)
        low, high = low[:-ROWS_TOGETHER], high[:-ROWS_TOGETHER]
        outcome = program(boxes)
        is_whole, new_low, new_high = boxes.split()
        yield outcome, is_whole, (boxes.high - boxes.low).prod(-1)
        missing = new_low.shape[1] - low.shape[1]
        if missing > 0:
            low, high = pad(low, (0, missing)), pad(high, (0, missing), value=1.0)
        low, high = torch.cat([low, new_low]), torch.cat([high, new_high])
