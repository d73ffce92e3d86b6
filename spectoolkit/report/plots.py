"""Figures from `Tables.overall`. Functions take an Axes and return it; nothing touches pyplot or global settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from spectoolkit import files
from spectoolkit.errors import UsageError
from spectoolkit.report import pgf, style
from spectoolkit.report.labels import label_line_ends, text_width_pt
from spectoolkit.report.text import position_names, short, value_text

MAX_BANDS = 4
FORMATS = ("png", "pdf")
AXIS_LABELS = {
    "acceptance_length": "acceptance length\n(tokens per target forward)",
    "acceptance_length_request_mean": "acceptance length, request mean\n(tokens per target forward)",
    "speedup": "expected speed-up\n(over plain decoding)",
    "sampling.temperature": "sampling temperature",
    "drafter.constant": "draft temperature",
    "num_draft_tokens": "draft tokens per step, K",
}


def acceptance_length_sweep(
    ax: Axes,
    overall: pd.DataFrame,
    *,
    x: str = "sampling.temperature",
    line: str = "drafter.name",
    metric: str = "acceptance_length",
    reference: Mapping[str, float] | None = None,
    looks: Mapping[object, Mapping[str, Any]] | None = None,
    label_ends: bool = True,
) -> Axes:
    """Acceptance length against a numeric setting, one line per `line`, intervals, labels at the ends.

    Intervals are shaded bands, or bars side by side where more than `MAX_BANDS` bands would blend into each other.

    Limits and size of `ax` should be final (see `sweep_figure`): labels are placed for them. Lines are drawn at their
    true x, so lines that coincide lie on each other, small filled markers inside larger hollow ones.

    Args:
        ax: the axes.
        overall: rows of `Tables.overall`, one per (x, line): select a panel first.
        x: column of numbers.
        line: column of labels.
        metric: a column with `_low` and `_high` beside it.
        reference: label -> value of horizontal lines, e.g. {"no drafting": 1.0}.
        looks: `style.line_styles` of a whole figure, so that a line looks the same in every panel.
        label_ends: whether labels stand at the ends of the lines; without them the figure needs a legend.

    Raises:
        UsageError: a missing column, `x` that is not numeric, or several rows at one point (never averaged).
    """
    check_rows(overall, [x, line, metric, f"{metric}_low", f"{metric}_high"], unique=[x, line])
    if not pd.api.types.is_numeric_dtype(overall[x]):
        raise UsageError(f"x: expected a numeric column, got {x!r} with {overall[x].tolist()[:3]}")
    looks = style.line_styles(overall[line]) if looks is None else looks
    with style.paper():
        set_length_limits(ax, overall, metric, reference)
        _set_ticks(ax, overall[x].tolist())
        ends, end_looks = {}, {}
        lines = overall[line].tolist()
        names = list(dict.fromkeys(lines))
        columns = overall[[x, metric, f"{metric}_low", f"{metric}_high"]].to_numpy(dtype=float)
        for rank, value in enumerate(names):
            points = columns[[i for i, other in enumerate(lines) if other == value]]
            at, y, low, high = points[np.argsort(points[:, 0])].T
            _intervals(ax, at, low, high, looks[value]["color"], rank, len(names))
            ax.plot(at, y, zorder=3 + 0.01 * rank, clip_on=False, **looks[value])
            drawn = np.flatnonzero(np.isfinite(y))
            if len(drawn):
                label = label_of(value)
                ends[label], end_looks[label] = (float(at[drawn[-1]]), float(y[drawn[-1]])), looks[value]
        for name, value in (reference or {}).items():
            ax.axhline(value, color="#777777", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1.5)
            ends[name] = (ax.get_xlim()[1], value)
            end_looks[name] = {"color": "#777777"}
        ax.set_xlabel(AXIS_LABELS.get(x, short(x)))
        ax.set_ylabel(AXIS_LABELS.get(metric, short(metric)))
        return label_line_ends(ax, ends, end_looks, style.SMALL_PT) if label_ends else ax


def acceptance_by_position(
    ax: Axes,
    overall: pd.DataFrame,
    *,
    line: str = "drafter.name",
    conditional: bool = False,
    looks: Mapping[object, Mapping[str, Any]] | None = None,
    label_ends: bool = True,
) -> Axes:
    """Share of steps with at least i accepted drafts against i, with intervals, one line per row of `overall`.

    Args:
        ax: the axes, of final size.
        overall: rows of `Tables.overall`, one per value of `line`: select a panel and a temperature first.
        line: column of labels.
        conditional: the share among steps that reached position i instead.
        looks, label_ends: as for `acceptance_length_sweep`.

    Raises:
        UsageError: a missing column, or several rows of one line.
    """
    check_rows(overall, [line, "accepted_at_1"], unique=[line])
    looks = style.line_styles(overall[line]) if looks is None else looks
    names = position_names(overall.columns)
    positions = np.arange(1, len(names) + 1)
    columns = [name + ("_conditional" if conditional else "") for name in names]
    with style.paper():
        ax.set_ylim(0, 1.0)
        _set_ticks(ax, positions.tolist())
        ends, end_looks = {}, {}
        for rank, row in enumerate(overall.to_dict("records")):
            # Tables of earlier versions have no intervals here.
            y, low, high = (
                np.array([row.get(name + end, np.nan) for name in columns], dtype=float)
                for end in ("", "_low", "_high")
            )
            _intervals(ax, positions, low, high, looks[row[line]]["color"], rank, len(overall))
            ax.plot(positions, y, zorder=3 + 0.01 * rank, clip_on=False, **looks[row[line]])
            drawn = np.flatnonzero(np.isfinite(y))
            if len(drawn):
                label = label_of(row[line])
                ends[label] = (float(positions[drawn[-1]]), float(y[drawn[-1]]))
                end_looks[label] = looks[row[line]]
        ax.set_xlabel("draft position i")
        ax.set_ylabel(
            "acceptance at i\n(share of steps that reach i)" if conditional else "at least i accepted\n(share of steps)"
        )
        return label_line_ends(ax, ends, end_looks, style.SMALL_PT) if label_ends else ax


def sweep_figure(
    overall: pd.DataFrame,
    *,
    panel: str | None = "verifier.name",
    x: str = "sampling.temperature",
    line: str = "drafter.name",
    metric: str = "acceptance_length",
    reference: Mapping[str, float] | None = None,
    width_in: float = style.PAGE_IN,
    height_in: float = 2.3,
) -> Figure:
    """`acceptance_length_sweep` in small multiples: one panel per `panel`, one shared y scale, one look per line.

    Args:
        overall: `Tables.overall`, one row per (panel, x, line).
        panel: column of panels; None draws one.
        x, line, metric, reference: as for `acceptance_length_sweep`.
        width_in: `style.COLUMN_IN` or `style.PAGE_IN`.
        height_in: of the figure.
    """
    check_rows(overall, [x, line, metric, *([] if panel is None else [panel])], unique=[])
    values = [None] if panel is None else list(dict.fromkeys(overall[panel]))
    looks = style.line_styles(overall[line])
    with style.paper():
        labels = [label_of(value) for value in looks] + list(reference or {})
        top = 0.08 if panel is None else 0.22
        fig, axes = panels(len(values), labels, top=top, width_in=width_in, height_in=height_in)
        set_length_limits(axes[0], overall, metric, reference)
        for i, (ax, value) in enumerate(zip(axes, values, strict=True)):
            rows = overall if panel is None else pd.DataFrame(overall[overall[panel] == value])
            ax.set_ylim(axes[0].get_ylim())  # set by hand, so the panel keeps them
            _set_ticks(ax, overall[x].tolist())
            acceptance_length_sweep(ax, rows, x=x, line=line, metric=metric, reference=reference, looks=looks)
            if panel is not None:
                lossy = "lossless" in rows and not all(rows["lossless"])
                ax.set_title(f"{label_of(value)}{' (lossy)' if lossy else ''}", loc="left", pad=5)
            if i:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
    return fig


def positions_figure(
    overall: pd.DataFrame,
    *,
    panel: str | None = "sampling.temperature",
    line: str = "drafter.name",
    conditional: bool = False,
    width_in: float = style.PAGE_IN,
    height_in: float = 2.3,
) -> Figure:
    """`acceptance_by_position` in small multiples: one panel per `panel`, one look per line.

    Lines are named at their ends, or in a legend above where the names would take more room than the panels.

    Args:
        overall: `Tables.overall`, one row per (panel, line).
        panel: column of panels; None draws one.
        line, conditional: as for `acceptance_by_position`.
        width_in, height_in: of the figure.
    """
    check_rows(overall, [line, *([] if panel is None else [panel])], unique=[])
    values = [None] if panel is None else list(dict.fromkeys(overall[panel]))
    looks = style.line_styles(overall[line])
    with style.paper():
        labels = [label_of(value) for value in looks]
        room = len(values) * max(text_width_pt(label, style.SMALL_PT) for label in labels) / 72
        label_ends = room < 0.45 * width_in
        legend = None if label_ends else legend_above(looks, width_in)
        top = (0.08 if panel is None else 0.22) + (legend.height_in if legend else 0.0)
        height_in += legend.height_in if legend else 0.0
        fig, axes = panels(len(values), labels if label_ends else [], top=top, width_in=width_in, height_in=height_in)
        for i, (ax, value) in enumerate(zip(axes, values, strict=True)):
            rows = overall if panel is None else pd.DataFrame(overall[overall[panel] == value])
            acceptance_by_position(ax, rows, line=line, conditional=conditional, looks=looks, label_ends=label_ends)
            if panel is not None:
                ax.set_title(f"{short(panel)} = {label_of(value)}", loc="left", pad=5)
            if i:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
        if legend:
            legend.draw(fig)
    return fig


@dataclass(frozen=True)
class Legend:
    """A legend across the top of a figure: its lines, in as many columns as fit, and the room that it takes."""

    handles: Sequence[Line2D]
    num_columns: int

    @property
    def height_in(self) -> float:
        return 0.17 * math.ceil(len(self.handles) / self.num_columns) + 0.06

    def draw(self, fig: Figure) -> None:
        """Put it onto `fig`."""
        fig.legend(
            handles=list(self.handles), loc="upper left", bbox_to_anchor=(0.03, 1.0), ncols=self.num_columns,
            frameon=False, columnspacing=1.2, handlelength=2.4, borderpad=0.2,
        )  # fmt: skip


def legend_above(looks: Mapping[Any, Mapping[str, Any]], width_in: float) -> Legend:
    """The legend of these lines above a figure of this width."""
    labels = [label_of(name) for name in looks]
    widths = [text_width_pt(label, style.SMALL_PT) / 72 + 0.5 for label in labels]
    handles = [Line2D([], [], **{**look}, label=label) for look, label in zip(looks.values(), labels, strict=True)]
    for num_columns in range(len(labels), 1, -1):
        columns = np.array_split(widths, num_columns)  # as Matplotlib fills them
        if sum(max(column) for column in columns) < width_in - 0.15:
            return Legend(handles, num_columns)
    return Legend(handles, 1)


def save(fig: Figure, folder: Path | str, name: str = "figure", formats: Sequence[str] = FORMATS) -> list[Path]:
    """`name`.png (300 dpi), `name`.pdf and, where asked for, `name`.pgf in `folder`; equal figures give equal bytes.

    Each file is replaced as a whole. None of them needs a TeX engine (`pgf`).
    """
    if unknown := [form for form in formats if form not in _WRITERS]:
        raise UsageError(f"formats: expected some of {', '.join(_WRITERS)}, got {', '.join(unknown)}")
    folder = Path(folder)
    if not hasattr(fig.canvas, "print_png"):
        FigureCanvasAgg(fig)
    with style.paper():
        return [files.replace(folder / f"{name}.{form}", partial(_WRITERS[form], fig)) for form in formats]


_WRITERS: dict[str, Callable[[Figure, Path], object]] = {
    "png": lambda fig, path: fig.savefig(path, metadata={"Software": None}),
    "pdf": lambda fig, path: fig.savefig(path, metadata={"CreationDate": None}),
    "pgf": pgf.write,
}


def panels(
    num_panels: int, labels: list[str], *, top: float, width_in: float, height_in: float, gap: float = 0.08
) -> tuple[Figure, list[Axes]]:
    """Axes of equal, final size with room for line-end labels right of each: a layout engine would move them later.

    Inches: `top` above the axes, `gap` between a panel's labels and the next panel.
    """
    fig = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(fig)
    left, bottom = 0.58, 0.40
    room = max((text_width_pt(label, style.SMALL_PT) for label in labels), default=0.0) / 72 + 0.17
    each = (width_in - left - num_panels * room - gap * (num_panels - 1)) / num_panels
    if each < 0.6:
        raise UsageError(f"panels: expected at most what fits {width_in} in with labels beside each, got {num_panels}")
    axes = []
    for i in range(num_panels):
        start = left + i * (each + room + gap)
        box = (start / width_in, bottom / height_in, each / width_in, (height_in - bottom - top) / height_in)
        axes.append(fig.add_axes(box))
    return fig, axes


def set_length_limits(ax: Axes, overall: pd.DataFrame, metric: str, reference: Mapping[str, float] | None) -> Axes:
    """Limits around all intervals and references; left alone where the caller has already fixed them."""
    ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if not ax.get_autoscaley_on():
        return ax
    columns = overall[[metric, f"{metric}_low", f"{metric}_high"]].to_numpy(dtype=float)
    values = np.concatenate([columns[np.isfinite(columns)], list((reference or {}).values())])
    if not len(values):
        return ax
    low, high = values.min(), values.max()
    pad = 0.06 * (high - low) or 0.1
    ax.set_ylim(low - pad, high + pad)
    return ax


def _intervals(
    ax: Axes, at: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str, rank: int, num_lines: int
) -> None:
    """A shaded band, or bars side by side where more than `MAX_BANDS` bands would blend into each other."""
    if not np.isfinite(low).any():
        return
    if num_lines <= MAX_BANDS:
        ax.fill_between(at, low, high, color=colour, alpha=0.16, linewidth=0, zorder=2)
        return
    aside_in = (rank - (num_lines - 1) / 2) * 1.3 / 72
    beside = ax.transData + ScaledTranslation(aside_in, 0, ax.figure.dpi_scale_trans)
    ax.vlines(at, low, high, color=colour, linewidth=0.8, alpha=0.8, zorder=2, transform=beside)


def _set_ticks(ax: Axes, x: Sequence[float]) -> None:
    """A tick at every measured point where they are few, labelled as far as the labels do not touch.

    Left alone where the caller has already fixed the limits.
    """
    points = np.unique(np.asarray(x, dtype=float))
    if not ax.get_autoscalex_on() or not len(points):
        return
    span = (points[-1] - points[0]) or 1.0
    ax.set_xlim(points[0] - 0.04 * span, points[-1] + 0.04 * span)
    if len(points) > 10:
        return
    texts = [value_text(float(point)) for point in points]
    centres = ax.transData.transform([(point, 0.0) for point in points])[:, 0] * 72 / ax.figure.dpi
    halves = [text_width_pt(text, style.SMALL_PT) / 2 + 1.5 for text in texts]
    last = len(texts) - 1
    used = -np.inf
    for i, (centre, half) in enumerate(zip(centres, halves, strict=True)):
        # The outermost label is always wanted, so its neighbours give way to it.
        fits = centre - half >= used and (i == last or centre + half <= centres[last] - halves[last])
        if fits or i == last:
            used = centre + half
        else:
            texts[i] = ""
    ax.set_xticks(points, texts)


def label_of(value: object) -> str:
    """A value of a column as a label: "same temperature"."""
    return value_text(value).replace("_", " ")


def check_rows(overall: pd.DataFrame, columns: list[str], unique: list[str]) -> None:
    """Refuse rows without these columns, or with two rows of the same values in `unique`."""
    missing = [name for name in columns if name not in overall.columns]
    if missing:
        raise UsageError(f"overall: expected the columns {', '.join(columns)}, {', '.join(missing)} missing")
    if unique and overall.duplicated(unique).any():
        twice = overall.loc[overall.duplicated(unique), unique].iloc[0].to_dict()
        raise UsageError(f"overall: expected one row per {' and '.join(unique)}, got several at {twice}; select first")
