"""Curves of a draft head's training, and the card that goes with the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectoolkit.report import style
from spectoolkit.report.labels import label_line_ends
from spectoolkit.report.plots import check_rows, panels


def curves(ax: Axes, log: pd.DataFrame, prefix: str, ylabel: str) -> Axes:
    """One line per depth of the columns `prefix`_1, `prefix`_2, .. over the column `step`; gaps are bridged.

    Args:
        ax: the axes, of final size: the depths are named at the ends of the lines.
        log: rows of `training.loop.train`.
        prefix: "loss" or "overlap"; an overlap is drawn from 0.
        ylabel: what the values are.

    Raises:
        UsageError: a missing column.
    """
    names = sorted(name for name in log.columns if name.startswith(f"{prefix}_"))
    check_rows(log, ["step", *(names or [f"{prefix}_1"])], unique=[])
    looks = style.line_styles(names)
    with style.paper():
        ends, end_looks = {}, {}
        for name in names:
            known = pd.DataFrame(log[log[name].notna()])
            look = dict(looks[name])
            if len(known) > 30:
                look |= {"marker": "none"}
            ax.plot(known["step"], known[name], **look)
            if len(known):
                label = f"depth {name.split('_')[-1]}"
                ends[label] = (float(known["step"].tolist()[-1]), float(known[name].tolist()[-1]))
                end_looks[label] = looks[name]
        ax.autoscale_view()  # labels are placed for the limits
        if prefix == "overlap":
            ax.set_ylim(bottom=0)
        ax.set_xlabel("training step")
        ax.set_ylabel(ylabel)
        return label_line_ends(ax, ends, end_looks, style.SMALL_PT)


def training_figure(log: pd.DataFrame, temperature: float, width_in: float = style.PAGE_IN) -> Figure:
    """Training loss at the left, acceptance on held-out prompts at the right, one line per depth."""
    with style.paper():
        fig, (left, right) = panels(2, ["depth 1"], top=0.1, width_in=width_in, height_in=2.3, gap=0.5)
        curves(left, log, "loss", "training loss (nats)")
        curves(right, log, "overlap", f"held-out Σ min(p, q), T = {temperature:g}")
    return fig


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
