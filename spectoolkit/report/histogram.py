"""How many tokens a step yields: the distribution behind an acceptance length."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spectoolkit import metrics
from spectoolkit.errors import UsageError
from spectoolkit.report import style
from spectoolkit.report.labels import wrapped
from spectoolkit.report.plots import check_rows
from spectoolkit.report.text import value_text

EMITTED, ACCEPTED = "emitted tokens per step", "accepted draft tokens per step"
_COLUMNS = ["count", "share", "share_low", "share_high"]
_FILL, _INK, _MEAN = "#9CC3E0", "#333333", "#D55E00"


def distribution(rows: pd.DataFrame, steps: pd.DataFrame | None = None) -> pd.DataFrame:
    """Share of steps per number of tokens, with intervals over prompts (`metrics.ratio_interval`).

    With the step records of a live cell: of *emitted* tokens, 1 .. K + 1, so that the mean is the acceptance length.
    Without them, from the sums of either engine: of *accepted and emitted* drafts, 0 .. K,

        share(i) = (Σ accepted_at[i] - Σ accepted_at[i + 1]) / Σ steps,    accepted_at[0] = steps.

    A replay has expected counts and no steps to look at. Its emitted tokens are not accepted ones plus one: a step that
    the end of the output cuts emits no token of the target's own, and what such steps accepted is not kept.

    Args:
        rows: request rows of one cell.
        steps: its step records (`records.step_frame`), or None.

    Returns:
        `count`, `share`, `share_low`, `share_high`, and `unit`: `EMITTED` or `ACCEPTED`.

    Raises:
        UsageError: not request rows, or step records that are not those of the rows.
    """
    metrics.check_rows(rows)
    total = rows["steps"].to_numpy(dtype=float)
    k = max(rows["num_draft_tokens"].tolist(), default=0)
    if steps is None:
        at = [
            [n, *values, *[0.0] * (k + 1 - len(values))] for n, values in zip(total, rows["accepted_at"], strict=True)
        ]
        numbers = -np.diff(np.array(at).reshape(len(rows), k + 2), axis=1)
        counts, unit = range(k + 1), ACCEPTED
    else:
        tally = Counter(zip(steps["request_id"].tolist(), steps["emitted"].tolist(), strict=True))
        emitted = range(1, k + 2)
        numbers = np.array([[float(tally[name, n]) for n in emitted] for name in rows["request_id"].tolist()])
        if len(steps) != numbers.sum() or (numbers.sum(axis=1) != total).any():
            raise UsageError(
                f"steps: expected the {total.sum():,.0f} step records of these requests, got {len(steps):,} of which "
                f"{numbers.sum():,.0f} fit"
            )
        counts, unit = range(1, k + 2), EMITTED
    found = []
    for column, count in enumerate(counts):
        share, span = metrics.ratio_interval(numbers[:, column].tolist(), total.tolist(), list(rows["cluster"]))
        found.append({"count": count, "share": share, "share_low": span.low, "share_high": span.high, "unit": unit})
    return pd.DataFrame(found)


def step_histogram(ax: Axes, found: pd.DataFrame) -> Axes:
    """One bar per number of tokens with its interval; the mean is marked on the axis.

    Args:
        ax: the axes.
        found: `distribution` of one cell.

    Raises:
        UsageError: a missing column, or several rows of one count.
    """
    check_rows(found, [*_COLUMNS, "unit"], unique=["count"])
    count, share, low, high = pd.DataFrame(found, columns=_COLUMNS).to_numpy(dtype=float).T
    with style.paper():
        ax.bar(count, share, width=0.72, color=_FILL, edgecolor=_INK, linewidth=0.6, zorder=2)
        ax.vlines(count, low, high, color=_INK, linewidth=1.1, zorder=3)
        mean = float(np.nansum(count * share))
        ax.axvline(mean, color=_MEAN, linewidth=1.0, linestyle=(0, (4, 1.5)), zorder=4)
        is_left = mean <= (count[0] + count[-1]) / 2
        ax.annotate(
            f"{mean:.2f}", (mean, 1), xycoords=("data", "axes fraction"), xytext=(3 if is_left else -3, -1),
            textcoords="offset points", ha="left" if is_left else "right", va="top", color=_MEAN,
            fontsize=style.SMALL_PT, zorder=5,
        )  # fmt: skip
        ax.set_xlim(count[0] - 0.6, count[-1] + 0.6)
        ax.set_xticks(count, [f"{value:g}" for value in count])
        ax.set_ylim(bottom=0)
        ax.grid(axis="x", visible=False)
        ax.set_xlabel(f"{found['unit'].iloc[0]} (dashed: mean)")
        ax.set_ylabel("share of steps")
    return ax


def histogram_figure(
    found: pd.DataFrame,
    *,
    row: str | None = None,
    column: str = "strategy",
    row_name: str = "",
    width_in: float = style.PAGE_IN,
) -> Figure:
    """`step_histogram` in small multiples of one scale: a column of panels per strategy, a row per value of `row`.

    Args:
        found: `distribution` of every cell, one under the other, with the columns `column` and `row`.
        row: column of the rows of panels; None draws one row.
        column: column of the columns of panels.
        row_name: what stands before a value of `row`, e.g. "T = ".
        width_in: of the figure.

    Raises:
        UsageError: more strategies than fit, or cells of different units, whose bars cannot be compared.
    """
    check_rows(found, [*_COLUMNS, "unit", column, *([row] if row else [])], unique=[])
    if len(units := list(dict.fromkeys(found["unit"]))) > 1:
        raise UsageError(f"found: expected distributions of one unit, got {' and '.join(units)}")
    across, down = list(dict.fromkeys(found[column])), list(dict.fromkeys(found[row])) if row else [None]
    left, right, gap, bottom, each_in, row_gap = 0.66, 0.08, 0.12, 0.36, 1.0, 0.14
    each = (width_in - left - right - gap * (len(across) - 1)) / len(across)
    counts = sorted({int(count) for count in found["count"]})
    if each < max(0.85, 0.11 * len(counts)):
        raise UsageError(f"strategies: expected at most as many panels as fit {width_in} in, got {len(across)}")
    with style.paper():
        heads = ["\n".join(wrapped(str(name).replace("_", " "), 72 * each - 2, style.FONT_PT)) for name in across]
        top = 0.1 + 0.13 * max(head.count("\n") + 1 for head in heads)
        height_in = bottom + top + each_in * len(down) + row_gap * (len(down) - 1)
        fig = Figure(figsize=(width_in, height_in))
        FigureCanvasAgg(fig)
        highest = float(np.nanmax(found[["share", "share_high"]].to_numpy(dtype=float)))
        for r, where in enumerate(down):
            base = bottom + (len(down) - 1 - r) * (each_in + row_gap)
            for c, name in enumerate(across):
                cell = found[(found[column] == name) & ((found[row] == where) if row else True)]
                start = left + c * (each + gap)
                ax = fig.add_axes((start / width_in, base / height_in, each / width_in, each_in / height_in))
                if len(cell):
                    step_histogram(ax, pd.DataFrame(cell))
                ax.set_xlim(counts[0] - 0.6, counts[-1] + 0.6)
                ax.set_xticks(counts, [str(count) for count in counts])
                ax.set_ylim(0, highest * 1.16)
                _trim(ax, r, c, len(down), len(cell) == 0)
                if r == 0:
                    ax.set_title(heads[c], loc="left", pad=4, linespacing=1.05)
                if c == 0 and row:
                    ax.set_ylabel(f"{row_name}{value_text(where)}\n(share of steps)")
        middle = (left + width_in - right) / 2 / width_in
        fig.text(
            middle, 0.03 / height_in, f"{units[0]} (dashed: mean)", ha="center", va="bottom", fontsize=style.FONT_PT
        )
    return fig


def _trim(ax: Axes, r: int, c: int, num_rows: int, is_empty: bool) -> None:
    """Labels stand at the outer panels only."""
    if is_empty:
        ax.set_axis_off()
    ax.set_xlabel("")
    if r < num_rows - 1:
        ax.tick_params(labelbottom=False)
    if c:
        ax.set_ylabel("")
        ax.tick_params(labelleft=False)
