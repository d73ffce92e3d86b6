"""Curves of a draft head's training, and the card that goes with the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spectoolkit.report import style


def curves(ax: Axes, log: pd.DataFrame, prefix: str, ylabel: str, legend: bool) -> Axes:
    """One line per depth of the columns `prefix`_1, `prefix`_2, .. over the column `step`; gaps are bridged.

    Args:
        ax: the axes.
        log: rows of `training.loop.train`.
        prefix: "loss" or "overlap".
        legend: whether the depths are named.
    """
    names = sorted(name for name in log.columns if name.startswith(f"{prefix}_"))
    looks = style.line_styles(names)
    for name in names:
        known = log[log[name].notna()]
        look = dict(looks[name])
        if len(known) > 30:
            look |= {"marker": "none"}
        ax.plot(known["step"], known[name], label=f"depth {name.split('_')[-1]}", **look)
    ax.set_xlabel("Training step")
    ax.set_ylabel(ylabel)
    if legend:
        ax.legend(frameon=False)
    return ax


def training_figure(log: pd.DataFrame, temperature: float, width_in: float = style.PAGE_IN) -> Figure:
    """Training loss at the left, acceptance on held-out prompts at the right, one line per depth."""
    with style.paper():
        figure = Figure(figsize=(width_in, 2.3), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        curves(left, log, "loss", "Training loss (nats)", legend=False)
        curves(right, log, "overlap", f"Held-out Σ min(p, q), T = {temperature:g}", legend=True)
        right.set_ylim(bottom=0)
    return figure


@dataclass(frozen=True)
class Card:
    """What whoever uses a head should know of it.

    Attributes:
        facts: name -> words.
        by_depth: `training.evaluate.means` of the held-out text, with intervals.
        temperature: at which it was measured.
        num_draft_tokens: K of the lengths.
        lengths: way to draft -> acceptance length with its interval.
        difference: of the first less the second of them, paired by prompt.
        command: that made it.
    """

    facts: Mapping[str, str]
    by_depth: pd.DataFrame
    temperature: float
    num_draft_tokens: int
    lengths: Mapping[str, tuple[float, float, float]]
    difference: tuple[float, float, float]
    command: str

    def markdown(self) -> str:
        """The card as it lies beside the weights."""
        names = list(self.lengths)
        lines = [f"# EAGLE-3 draft head for {self.facts['Target']}", ""]
        lines += [f"- **{name}**: {value}" for name, value in self.facts.items()]
        lines += [
            f"- **Command**: `{self.command}`",
            "- **Licence**: that of the target, from whose weights and outputs it was made (SmolLM2: Apache-2.0)",
            "",
            f"## Held-out prompts, T = {self.temperature:g}",
            "",
            "Teacher-forced on text of the target, 95 % intervals over prompts. *Overlap* is Σ min(p, q), the "
            "acceptance of a draft drawn from q; *agreement*: p and q have the same most probable token; *argmax*: p "
            "of q's most probable token, the acceptance of an argmax draft.",
            "",
            "| depth | overlap | agreement | argmax |",
            "|---:|---|---|---|",
        ]
        for row in self.by_depth.to_dict("records"):
            shown = [
                _with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"], 3)
                for name in ("overlap", "agreement", "argmax_acceptance")
            ]
            lines.append(f"| {row['depth']:.0f} | {' | '.join(shown)} |")
        lines += [
            "",
            f"Acceptance length under rejection, K = {self.num_draft_tokens}, replayed on the same text:",
            "",
            *[f"- {name}: {_with_interval(*length, 2)}" for name, length in self.lengths.items()],
            f"- {names[0]} less {names[1]}, paired by prompt: {_with_interval(*self.difference, 2)}",
        ]
        return "\n".join(lines) + "\n"


def _with_interval(value: float, low: float, high: float, digits: int) -> str:
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
