"""How figures look: sizes for a two-column paper, fonts, and one colour, marker and dash per line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl

COLUMN_IN = 3.3
PAGE_IN = 6.9
FONT_PT = 7.5
SMALL_PT = 7.0

# Okabe & Ito, Color Universal Design (2008); without black (the axes are dark) and yellow (too pale).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")  # 8, and 5 dashes: looks repeat after 120 lines only
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1)))
INK = "#333333"

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": FONT_PT,
    "axes.labelsize": FONT_PT,
    "axes.titlesize": FONT_PT,
    "xtick.labelsize": SMALL_PT,
    "ytick.labelsize": SMALL_PT,
    "legend.fontsize": SMALL_PT,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.2,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # embed fonts as TrueType: text stays selectable, and submission systems accept it
    "svg.fonttype": "none",
}


def paper() -> AbstractContextManager[Any]:
    """The look of every figure here, for the duration of a `with` block; a caller's own settings come back after it."""
    return mpl.rc_context(_RC)


def line_styles(values: Iterable[object]) -> dict[object, dict[str, Any]]:
    """One look per distinct value, in order of first appearance; colour, marker and dash each tell lines apart alone.

    Every second marker is hollow and larger, so that two lines that coincide both stay visible.
    """
    styles = {}
    for i, value in enumerate(dict.fromkeys(values)):
        colour, hollow = _cycle(_COLOURS, i), i % 2 == 1
        styles[value] = {
            "color": colour,
            "marker": _cycle(_MARKERS, i),
            "linestyle": _cycle(_DASHES, i),
            "markerfacecolor": "none" if hollow else colour,
            "markeredgecolor": colour,
            "markeredgewidth": 0.9,
            "markersize": 5.2 if hollow else 3.2,
        }
    return styles


def _cycle(items: Sequence[Any], i: int) -> Any:
    return items[i % len(items)]
