"""Figures as PGF, for a document whose own fonts and size commands the letters should follow.

matplotlib's PGF backend asks a TeX engine how wide a text is. Here the widths are those of the bundled font instead, so
that a file can be written, and comes out the same, on a machine without TeX. Single lines are anchored by TeX itself,
so a font of other widths in the document moves nothing but the lines of a paragraph against each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_pgf import RendererPgf
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from spectoolkit.report.text import latex_escape

_HEAD = r"""% \usepackage{pgf,amssymb} and \input this file; the letters are those of the document
\begingroup
\makeatletter
\def\mathdefault#1{#1}%
\begin{pgfpicture}
"""
_TAIL = r"""\end{pgfpicture}
\makeatother
\endgroup
"""


class _Renderer(RendererPgf):
    """Measures with the bundled font, and escapes what TeX would read as a command."""

    def get_text_width_height_descent(self, s: str, prop: FontProperties, ismath: Any) -> tuple[float, float, float]:
        width, height, descent = text_to_path.get_text_width_height_descent(s, prop, ismath)
        scale = self.dpi / 72
        return width * scale, height * scale, descent * scale

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: FontProperties, angle: float, ismath: Any = False,
        mtext: Any = None,
    ) -> None:  # fmt: skip
        prop = prop.copy()
        prop.set_family("sans-serif")  # the document's, instead of a file of this machine
        super().draw_text(gc, x, y, s if ismath else latex_escape(s), prop, angle, ismath, mtext)


def write(fig: Figure, path: Path) -> None:
    """Write `fig` to `path`; equal figures give equal bytes."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        width, height = fig.get_size_inches()
        file.write(_HEAD)
        file.write(rf"\pgfpathrectangle{{\pgfpointorigin}}{{\pgfqpoint{{{width:f}in}}{{{height:f}in}}}}%" + "\n")
        file.write(r"\pgfusepath{use as bounding box, clip}%" + "\n")
        fig.draw(_Renderer(fig, file))
        file.write(_TAIL)
