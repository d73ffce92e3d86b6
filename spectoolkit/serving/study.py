"""Predicted rows: the cells of a study, from its table.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from spectoolkit.errors import UsageError
from spectoolkit.report import text

_NEEDED = ("scope", "lossless", "acceptance_length", "acceptance_length_nominal", "steps", "proposing_steps")
_NEEDED += ("drafted", "accepted")
_K = "num_draft_tokens"


@dataclass(frozen=True)
class Predicted:
    """One cell of a study.

    Attributes:
        where: heading -> value of its axes, and its engine, as text.
        numbers: its numeric columns, K among them (the number of its positions where it is no axis).
        is_cut: whether its accepted tokens end with the output (replayed cells).
    """

    where: Mapping[str, str]
    numbers: Mapping[str, float]
    is_cut: bool


def read(folder: str, num_draft_tokens: int | None) -> list[Predicted]:
    """The cells of the study in `folder`; those of K = `num_draft_tokens` where that is given.

    Raises:
        UsageError: no study's table there, or no cell of that K.
    """
    path = Path(folder) / "table.csv"
    if not path.exists() and path.with_name("manifest.json").exists():  # single cells and `cases=` leave no table
        raise UsageError(
            f"study: expected a study's folder with a table.csv, got {folder} without one; `spectoolkit report "
            f"study={folder}` makes it from the cells: then study={path.parent / 'report'}"
        )
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"study: expected a study's folder with a table.csv, got {folder} ({error})") from error
    if missing := [name for name in _NEEDED if name not in table.columns]:
        raise UsageError(
            f"study: expected a table of cells in {path}, with the columns of every grid; {', '.join(missing)} missing"
        )
    names = list(table.columns)
    head = [name for name in names[: names.index("lossless")] if name not in ("scope", "category")]
    shown = [name for name in head if name.partition(".")[0] not in head or "." not in name]
    cells = [_cell(row, shown) for row in pd.DataFrame(table[table["scope"] == "overall"]).to_dict("records")]
    kept = [cell for cell in cells if num_draft_tokens in (None, cell.numbers[_K])]
    if not kept:
        lengths = ", ".join(f"{k:g}" for k in sorted({cell.numbers[_K] for cell in cells}))
        raise UsageError(
            f"study: expected cells with K = {num_draft_tokens}, which was served, got {lengths or 'none'}"
        )
    return kept


def _cell(row: Mapping[object, object], shown: list[str]) -> Predicted:
    numbers = {str(name): float(value) for name, value in row.items() if isinstance(value, (int, float))}
    numbers.setdefault(_K, float(sum(not math.isnan(numbers[name]) for name in text.position_names(numbers))))
    where = {heading: text.value_text(row[name]) for name, heading in text.headings(shown).items()}
    where |= {"lossless": text.value_text(bool(row["lossless"]))}
    return Predicted(where, numbers, math.isnan(numbers["acceptance_length_nominal"]))
