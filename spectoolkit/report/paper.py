"""A small LaTeX document around a table and figures: what a paper's preamble needs."""

from __future__ import annotations

from collections.abc import Sequence

from spectoolkit.report.text import latex_escape

ENGINES = ("pdflatex", "lualatex", "xelatex")


def document(title: str, table: str | None, figures: Sequence[tuple[str, str]]) -> str:
    """The source of a document that inputs a table and includes figures by their file names, without ".pdf".

    Args:
        title: of the document.
        table: file name of a floating table, without ".tex"; None for none.
        figures: (file name, caption) of each.
    """
    lines = [
        r"\documentclass{article}",
        r"\usepackage[T1]{fontenc}",
        r"\usepackage[utf8]{inputenc}",
        r"\usepackage{lmodern}",
        r"\usepackage[textwidth=6.9in,textheight=9.2in]{geometry}",
        r"\usepackage{amssymb}",
        r"\usepackage{booktabs}",
        r"\usepackage{siunitx}",
        r"\usepackage{graphicx}",
        r"\setlength{\belowcaptionskip}{6pt}",
        r"\makeatletter",  # floats stay near their place
        r"\def\fps@table{!htbp}",
        r"\def\fps@figure{!htbp}",
        r"\makeatother",
        rf"\title{{{latex_escape(title)}}}",
        r"\date{}",
        r"\begin{document}",
        r"\maketitle",
    ]
    if table is not None:
        lines.append(rf"\input{{{table}}}")
    for name, caption in figures:
        lines += [
            r"\begin{figure}",
            r"\centering",
            rf"\includegraphics{{{name}.pdf}} % or, with the pgf package, \input{{{name}.pgf}}",
            rf"\caption{{{latex_escape(caption)}}}",
            r"\end{figure}",
        ]
    return "\n".join([*lines, r"\end{document}"]) + "\n"
