"""One cell of a study, how it is read, and the check that cells may stand in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pandas as pd

from spectoolkit import metrics
from spectoolkit.errors import UsageError
from spectoolkit.frames import DamagedFile, read_frame

LOSSLESS_KEY = "verifier.is_lossless"
_ABSENT = "(absent)"
# Every table has a column that says which cell was obtained how.
_SHOWN_ANYWAY = ("engine",)
_COMPONENTS = ("target", "draft_model", "drafter", "verifier", "prompts")
# Follows from the verifier and its settings, and from a drafter that is wrong on purpose: it varies where these do.
_DERIVED = {LOSSLESS_KEY: ("verifier", "drafter")}


@dataclass(frozen=True)
class CellResult:
    """The request rows of one cell with everything that was chosen to make them.

    Attributes:
        settings: flat dotted keys to values, e.g. "sampling.temperature": 0.7, "drafter.name": "argmax",
            "num_draft_tokens": 4; "verifier.is_lossless" must be among them.
        rows: its request rows (`records.request_row`).
    """

    settings: Mapping[str, object]
    rows: pd.DataFrame


def read_rows(path: Path, *, is_sealed: bool) -> pd.DataFrame:
    """The request rows in a cell's file, which is named FINGERPRINT.parquet.

    Files of older versions do not say in their metadata whose rows they hold, and are taken as they are.

    Args:
        path: of the file.
        is_sealed: whether it has to have a checksum (`frames.read_frame`).

    Raises:
        DamagedFile: it is not what was written, or it is another cell's.
        UsageError: it does not hold request rows.
        OSError: it cannot be read.
    """
    rows = read_frame(path, is_sealed=is_sealed)
    metrics.check_rows(rows)
    if (fingerprint := rows.attrs.get("fingerprint", path.stem)) != path.stem:
        raise DamagedFile(f"it holds the rows of cell {fingerprint}")
    return rows


def prompt_note(cells: Iterable[CellResult]) -> str:
    """What was changed in or left out of the prompts of the cells (`study.Experiment.prompt_changes`), or ""."""
    changes = [change for cell in cells for change in (cell.rows.attrs.get("prompt_changes") or {}).items()]
    found = "; ".join(f"{count} {what}" for what, count in dict.fromkeys(changes))
    return f"Of the prompt set: {found}." if found else ""


def covers(axis: str, key: str) -> bool:
    """Whether `axis` may vary setting `key`: the key itself, or any key below it ("drafter" covers "drafter.name")."""
    return key == axis or key.startswith(axis + ".") or axis.split(".")[0] in _DERIVED.get(key, ())


class HasSettings(Protocol):
    """A cell, computed or not."""

    @property
    def settings(self) -> Mapping[str, object]: ...


def check_shared(cells: Sequence[HasSettings], axes: Sequence[str]) -> None:
    """Refuse cells that do not belong in one table.

    Raises:
        UsageError: no cells; an axis that no setting has; a setting not under `axes` that differs between cells (every
            such key is listed with its values: such cells are never averaged or shown side by side); two cells at one
            point of the axes.
    """
    if not cells:
        raise UsageError("cells: expected at least one cell, got none")
    keys = sorted({key for cell in cells for key in cell.settings})
    for axis in axes:
        if not any(covers(axis, key) for key in keys):
            raise UsageError(
                f"axes: expected settings of the cells ({', '.join(keys)}) or groups of them, got {axis!r}"
            )
    free = [key for key in keys if any(covers(axis, key) for axis in axes)]

    differing = []
    for key in keys:
        values = list(dict.fromkeys(_text(cell, key) for cell in cells))
        if key not in (*free, *_SHOWN_ANYWAY) and len(values) > 1:
            differing.append(f"{key}: {', '.join(values)}")
    if differing:
        raise UsageError(
            f"cells: expected equal settings outside the axes {', '.join(axes)}, got different values of\n  "
            + "\n  ".join(differing)
        )

    seen: set[tuple[str, ...]] = set()
    for cell in cells:
        point = tuple(_text(cell, key) for key in free)
        if point in seen:
            where = ", ".join(f"{key}={value}" for key, value in zip(free, point, strict=True))
            raise UsageError(f"cells: expected one cell per point of the axes, got two at {where or 'no axis'}")
        seen.add(point)


def varying_axes(cells: Sequence[HasSettings], first: Sequence[str] = ()) -> list[str]:
    """The axes that cells differ in: components ("drafter") as groups, other settings by their keys.

    Args:
        cells: of one study.
        first: axes that come first where they are among them, in this order.
    """
    keys = list(dict.fromkeys(key for cell in cells for key in cell.settings))
    varying = [key for key in keys if len({_text(cell, key) for cell in cells}) > 1]
    named = [key for key in varying if key not in (*_SHOWN_ANYWAY, *_DERIVED)]
    axes = dict.fromkeys(key.split(".")[0] if key.split(".")[0] in _COMPONENTS else key for key in named)
    return [*(axis for axis in dict.fromkeys(first) if axis in axes), *(axis for axis in axes if axis not in first)]


def axis_columns(cells: Sequence[HasSettings], axis: str) -> dict[str, list[object]]:
    """The table columns of one axis, one value per cell.

    An exact key ("sampling.temperature") gives itself. A group ("drafter") gives a short label under its own name (the
    component's `name`, with other settings in brackets only where two cells of that name differ in them), then every
    setting below it.
    """
    if all(axis in cell.settings for cell in cells):
        return {axis: [cell.settings[axis] for cell in cells]}
    members = list(dict.fromkeys(k for c in cells for k in c.settings if covers(axis, k) and k != LOSSLESS_KEY))
    labels = [_label(cell, [c for c in cells if _same_name(axis, c, cell)], axis, members) for cell in cells]
    return {axis: labels, **{key: [cell.settings.get(key) for cell in cells] for key in members}}


def _same_name(axis: str, one: HasSettings, other: HasSettings) -> bool:
    return _text(one, f"{axis}.name") == _text(other, f"{axis}.name")


def _label(cell: HasSettings, namesakes: Sequence[HasSettings], axis: str, members: Sequence[str]) -> object:
    name = cell.settings.get(f"{axis}.name")
    varying = [k for k in members if k != f"{axis}.name" and len({_text(c, k) for c in namesakes}) > 1]
    details = ", ".join(f"{k.removeprefix(axis + '.')}={_text(cell, k)}" for k in varying if k in cell.settings)
    if name is None:
        return details or axis
    return f"{name} ({details})" if details else str(name)


def _text(cell: HasSettings, key: str) -> str:
    """A value as text, equal for equal values: 1 and 1.0 are one temperature."""
    if key not in cell.settings:
        return _ABSENT
    value = cell.settings[key]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)
