"""The same sampling parameters on both sides or not: what it costs, and which rows sample what was asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from spectoolkit import files, metrics
from spectoolkit.datatypes import SamplingParams
from spectoolkit.errors import UsageError
from spectoolkit.exactness.proof import EXACT, distances_on_toy
from spectoolkit.exactness.target_law import law_variation
from spectoolkit.progress import progress_bar
from spectoolkit.report import sampling_params as figures
from spectoolkit.report import tables, text
from spectoolkit.report.cells import CellResult
from spectoolkit.studies.output import compute, write
from spectoolkit.study import Cell, Store

TITLE = "Acceptance and exactness with sampling parameters on both sides or not"
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
SIDES = {(True, True): "both", (True, False): "target only", (False, True): "draft only", (False, False): "neither"}
"""(target has it, draft has it) -> which side has what was asked for."""
_WORDS = {name: name.replace("_", " ") for name in DEFAULTS} | {
    n: n.replace("_", "-") for n in ("top_k", "top_p", "min_p")
}
OFF = ("draft only", "neither")
"""Sides on which the target's row is not what was asked for."""

METRICS = ("acceptance_rate_unmasked", "acceptance_rate", "system_efficiency", "acceptance_length")
COMPARISONS = (("draft only", "both"), ("draft only", "neither"), ("target only", "both"))
"""Left out of the target; with it left out there, had by the draft or not; left out of the draft."""
COMPARED = ("question", "num_draft_tokens", "one", "other", "same_law", "metric", "difference", "difference_low",
            "difference_high", "excludes_zero")  # fmt: skip
"""Columns of `comparisons`; it has no rows where no side stands beside one that it is compared with."""


@dataclass(frozen=True)
class Question:
    """What the user asks for, and which part of it a side may leave out (at its default then).

    Raises:
        UsageError: unknown parameters or values, or a part that was not asked for or is named twice.
    """

    asked: Mapping[str, float]
    left_out: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := [str(name) for name in self.asked if name not in DEFAULTS]:
            raise UsageError(
                f"study.questions: expected parameters among {', '.join(DEFAULTS)}, got {', '.join(unknown)}"
            )
        names = list(self.asked)  # a list: what it is asked for need not be hashable
        is_twice = any(name in self.left_out[:i] for i, name in enumerate(self.left_out))
        if not self.left_out or is_twice or any(name not in names for name in self.left_out):
            raise UsageError(
                f"study.questions: expected left_out to name some of {', '.join(names)}, each once, got "
                f"{list(self.left_out)}"
            )
        SamplingParams(**self.asked)  # type: ignore[arg-type]

    @staticmethod
    def of(given: Mapping[str, Any]) -> Question:
        """Out of a configuration: {asked: {..}, left_out: [..]}."""
        if (
            set(given) != {"asked", "left_out"}
            or not isinstance(given["asked"], Mapping)
            or not isinstance(given["left_out"], list | tuple)
        ):
            raise UsageError(
                f"study.questions: expected mappings like {{asked: {{top_p: 0.9}}, left_out: [top_p]}}, got {given!r}"
            )
        return Question(dict(given["asked"]), tuple(given["left_out"]))

    @cached_property
    def name(self) -> str:
        """The part in question: "top-p = 0.9"."""
        return ", ".join(f"{_WORDS[name]} = {self.asked[name]:g}" for name in self.left_out)

    @cached_property
    def whole(self) -> dict[str, float]:
        """Every parameter of a side that has what was asked for."""
        return {**DEFAULTS, **self.asked}

    @cached_property
    def without(self) -> dict[str, float]:
        """Every parameter of a side that leaves the part out."""
        return {**self.whole, **{name: DEFAULTS[name] for name in self.left_out}}

    def side(self, settings: Mapping[str, Any]) -> str | None:
        """Which sides of a cell have the part (a value of `SIDES`); None for a cell that does not belong here."""
        has = tuple(self._has(params) for params in (target_params(settings), draft_params(settings)))
        return None if None in has else SIDES[has]  # type: ignore[index]

    def _has(self, params: Mapping[str, float]) -> bool | None:
        if _equal(params, self.whole):
            return True
        return False if _equal(params, self.without) else None


def target_params(settings: Mapping[str, Any]) -> dict[str, float]:
    """The parameters of a cell's target rows: the request's."""
    return {name: settings.get(f"sampling.{name}", default) for name, default in DEFAULTS.items()}


def draft_params(settings: Mapping[str, Any]) -> dict[str, float]:
    """The parameters of a cell's draft rows: the drafter's own, and the request's where it has none.

    Raises:
        UsageError: a drafter that does not sample from a draft model.
    """
    target = target_params(settings)
    own = {name: settings.get(f"drafter.{name}") for name in DEFAULTS if name != "temperature"}
    ratio, constant = settings.get("drafter.ratio"), settings.get("drafter.constant")
    if ratio is None and constant is None:
        raise UsageError(
            "sampling_params: expected a drafter that samples from a draft model (drafter=temperature), got "
            f"drafter={settings.get('drafter.name')}"
        )
    temperature = target["temperature"] * float(ratio or 0.0) if constant is None else float(constant)
    return {"temperature": temperature} | {n: target[n] if value is None else value for n, value in own.items()}


def _equal(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(math.isclose(one[name], other[name], rel_tol=1e-9) for name in DEFAULTS)


def check(cells: Sequence[Cell], axes: Sequence[str], *, questions: Sequence[Mapping[str, Any]]) -> None:
    """Refuse cells that answer no question, and questions that lack cells, before any is computed.

    Raises:
        UsageError: no question, an ill-formed one or two of one name; a cell that is replayed, lossy, or whose two
            sides have neither what a question asks for nor that without the part; two cells at one place; a question
            without a cell, or without one that has the parameters on both sides; more than the figure has room for.
    """
    asked = [Question.of(question) for question in questions]
    if not asked:
        raise UsageError("study.questions: expected at least one, got none")
    names = [question.name for question in asked]
    if len(set(names)) < len(names):
        raise UsageError(f"study.questions: expected different parts in question, got {'; '.join(names)}")
    for cell in cells:
        if cell.engine != "live":
            raise UsageError(
                "sampling_params: expected engine=live, since a replay does not know the unmasked rate, got "
                f"{cell.engine}"
            )
        if not cell.settings["verifier.is_lossless"]:
            raise UsageError(
                "sampling_params: expected lossless rules, which emit the law of the target's row, got "
                f"drafter={cell.settings['drafter.name']}, verifier={cell.settings['verifier.name']}"
            )
    _check_places(cells, asked)


def _check_places(cells: Sequence[Cell] | Sequence[CellResult], questions: Sequence[Question]) -> None:
    found = places([cell.settings for cell in cells], questions)
    for i, cell in enumerate(cells):
        if i not in found.values():
            raise UsageError(
                "sampling_params: expected cells whose sides have what a question asks for, or that without the part "
                f"left out; got target {_text(target_params(cell.settings))} with draft "
                f"{_text(draft_params(cell.settings))}"
            )
    for question in questions:
        here = {(k, side) for name, k, side in found if name == question.name}
        if not here:
            raise UsageError(f"study.questions: no cell of the grid has its parameters ({question.name})")
        for k in sorted({k for k, _ in here}):
            if (k, "both") not in here:
                raise UsageError(f"sampling_params: expected a cell with {question.name} on both sides at K = {k}")
    ks = {question.name: sorted({k for name, k, _ in found if name == question.name}) for question in questions}
    figures.column_widths(ks)


def _text(params: Mapping[str, float]) -> str:
    changed = [f"{_WORDS[name]} = {value:g}" for name, value in params.items() if value != DEFAULTS[name]]
    return ", ".join(changed) or "defaults"


def places(points: Sequence[Mapping[str, Any]], questions: Sequence[Question]) -> dict[tuple[str, int, str], int]:
    """(question, K, side) -> index of the cell (its settings); one cell may have several places.

    A side that stands alone at its K has no place, as there is nothing to compare it with.

    Raises:
        UsageError: two cells at one place.
    """
    found: dict[tuple[str, int, str], int] = {}
    for i, settings in enumerate(points):
        for question in questions:
            if (side := question.side(settings)) is None:
                continue
            place = (question.name, int(settings["num_draft_tokens"]), side)
            if place in found:
                raise UsageError(f"sampling_params: expected one cell per place, got two at {place}")
            found[place] = i
    shared = Counter(place[:2] for place in found)
    return {place: i for place, i in found.items() if shared[place[:2]] > 1}


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    questions: Sequence[Mapping[str, Any]],
) -> str:
    """Compute the cells, and for each how far its output's law is from the one that was asked for.

    Writes sides.csv (`by_side`), laws.csv (`laws`) and comparisons.csv (`comparisons`) beside the usual tables.

    Args:
        questions: each {asked: parameters, left_out: names of those that a side may leave out}.
    """
    asked = [Question.of(question) for question in questions]
    results = with_variation(cells, compute(cells, store, config), asked, store)
    built = tables.build(results, axes)
    law, found, compared = laws(cells, asked), by_side(results, asked), comparisons(results, asked)
    for name, frame in (("laws", law), ("sides", found), ("comparisons", compared)):
        files.replace_text(store.folder / f"{name}.csv", frame.to_csv(index=False, lineterminator="\n"))
    figure = figures.sampling_params_figure(found)
    return write(store, cells, config, built, TITLE, figure, findings(law, found, compared))


def with_variation(
    cells: Sequence[Cell], results: Sequence[CellResult], questions: Sequence[Question], store: Store
) -> list[CellResult]:
    """`results` with a column per question, Σ total variation over the output, where the target leaves the part out.

    Computed once (`law_variation`) and kept with the cell's rows.
    """
    by_name = {question.name: question for question in questions}
    found = places([cell.settings for cell in cells], questions)
    lacks = [(cells[i], results[i], by_name[name]) for (name, _, side), i in found.items() if side in OFF]
    missing = [(cell, result, question) for cell, result, question in lacks if _column(question) not in result.rows]
    with progress_bar(sum(len(result.rows) for _, result, _ in missing), "request") as bar:
        for cell, result, question in missing:
            experiment = cell.build()
            outputs = {row["request_id"]: row["tokens"] for row in result.rows.to_dict("records")}
            tokens = [[int(token) for token in outputs[request.id]] for request in experiment.requests]
            asked = replace(experiment.requests[0].params, **question.whole)
            sums = law_variation(experiment.target, experiment.requests, tokens, asked)
            by_request = dict(zip([request.id for request in experiment.requests], sums.tolist(), strict=True))
            result.rows[_column(question)] = [by_request[request_id] for request_id in result.rows["request_id"]]
            kept = ("wall_s", "prompt_changes", "kernels", "graphs")  # what the rows themselves were computed with
            store.save(cell, result.rows, {key: value for key, value in result.rows.attrs.items() if key in kept})
            bar.update(len(result.rows))
    return list(results)


def _column(question: Question) -> str:
    return f"variation, {question.name}"


def laws(cells: Sequence[Cell], questions: Sequence[Question]) -> pd.DataFrame:
    """Per question and side: the parameters of both rows, and what is emitted, by enumeration on toys.

    `toy_own` is the distance of the emitted law from the target's own (0: lossless), `toy_asked` from the one that was
    asked for; `samples_asked` says whether that is 0 too. A pair that cannot be enumerated has NaN, and samples what
    was asked for if the target's parameters are those.
    """
    found = places([cell.settings for cell in cells], questions)
    rows: list[dict[str, Any]] = []
    for question in questions:
        for side in SIDES.values():
            here = [i for (name, _, s), i in found.items() if (name, s) == (question.name, side)]
            if not here:
                continue
            cell = cells[here[-1]]
            params = replace(_sampling(cell.settings), **target_params(cell.settings))
            distances = distances_on_toy(cell.pair_on, params, replace(params, **question.whole))
            own, asked = distances or (math.nan, math.nan)
            is_exact = side not in OFF if math.isnan(asked) else max(own, asked) <= EXACT
            row = {"question": question.name, "side": side}
            row |= {"target": _text(target_params(cell.settings)), "draft": _text(draft_params(cell.settings))}
            rows.append(row | {"toy_own": own, "toy_asked": asked, "samples_asked": is_exact})
    return pd.DataFrame(rows)


def _sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """The request's parameters, those that are the same in all cells included."""
    names = ("frequency_penalty", "presence_penalty")
    same = {name: settings[f"sampling.{name}"] for name in names if f"sampling.{name}" in settings}
    return SamplingParams(**same)


def by_side(results: Sequence[CellResult], questions: Sequence[Question]) -> pd.DataFrame:
    """Per question, K and side: `METRICS` with intervals, and the total variation per token from what was asked for.

    `variation` is the mean over emitted tokens, 0 where the target's row has what was asked for. Of a filter it is the
    probability that the filter would have cut off, of what was emitted.
    """
    found = places([result.settings for result in results], questions)
    order = list(SIDES.values())
    rows: list[dict[str, Any]] = []
    for question in questions:
        here = [(k, side, i) for (name, k, side), i in found.items() if name == question.name]
        for k, side, i in sorted(here, key=lambda place: (place[0], order.index(place[1]))):
            frame = results[i].rows
            row: dict[str, Any] = {"question": question.name, "num_draft_tokens": k, "side": side}
            row["samples_asked"] = side not in OFF
            row |= dict.fromkeys(("variation", "variation_low", "variation_high"), 0.0)
            if not row["samples_asked"]:
                sums = (frame[_column(question)].tolist(), frame["emitted"].tolist(), frame["cluster"].tolist())
                row["variation"], (row["variation_low"], row["variation_high"]) = metrics.ratio_interval(*sums)
            summary, spans = metrics.summarise(frame), metrics.bootstrap(frame, METRICS)
            for metric in METRICS:
                row[metric] = summary[metric]
                row[f"{metric}_low"], row[f"{metric}_high"] = spans[metric]
            rows.append(row)
    return pd.DataFrame(rows)


def comparisons(results: Sequence[CellResult], questions: Sequence[Question]) -> pd.DataFrame:
    """Per question, K, comparison (`COMPARISONS`) and metric: the difference, paired by prompt.

    `same_law` says whether both sides emit the same law; where they do not, the texts differ in kind as well.
    """
    found = places([result.settings for result in results], questions)
    rows: list[dict[str, Any]] = []
    for question in questions:
        for k in sorted({k for name, k, _ in found if name == question.name}):
            for one, other in COMPARISONS:
                pair = [found.get((question.name, k, side)) for side in (one, other)]
                if None in pair:
                    continue
                a, b = (results[i].rows for i in pair if i is not None)
                for metric in METRICS:
                    difference = metrics.paired_difference(a, b, metric)
                    row = {"question": question.name, "num_draft_tokens": k, "one": one, "other": other}
                    row |= {"same_law": other == "neither" or one == "target only", "metric": metric}
                    row |= metrics.with_ends("difference", difference)
                    rows.append(row | {"excludes_zero": difference.excludes_zero})
    return pd.DataFrame(rows, columns=pd.Index(COMPARED))


def findings(law: pd.DataFrame, found: pd.DataFrame, compared: pd.DataFrame) -> list[str]:
    """Paragraphs of table.md."""
    shown = ["## What each row samples", text.grid([_law_row(row) for row in law.to_dict("records")])]
    shown.append(
        "Every rule here is lossless: it emits the law of the *target's* row, whatever the draft's row leaves out. So "
        "a row samples what was asked for if and only if its target has the parameters. *Toy* columns are total "
        "variations of the three tokens of a step, enumerated on a random model with the drafter's and the verifier's "
        f"own code (exact to {EXACT:g})."
    )
    shown += [f"- {sentence}" for sentence in _exactness(found)]
    shown += ["## Acceptance by side", text.grid([_side_row(row) for row in found.to_dict("records")])]
    shown.append(
        "*Off by*: total variation per emitted token between the law that was sampled and the one that was asked for, "
        "on the outputs themselves; of a filter, the probability that it would have cut off. *Rate, unmasked*: every "
        "draft judged alone; *prefix*: up to the first rejection."
    )
    if not len(compared):
        return shown
    shown += ["## What leaving out costs", text.grid(_comparison_rows(compared))]
    shown.append(
        "Differences are paired by prompt; each interval stands alone. *Same law*: both rows sample the same law, so "
        "the difference is due to the drafts alone; elsewhere the texts differ as well, and one of the two rows does "
        "not sample what was asked for."
    )
    return [*shown, *(f"- {sentence}" for sentence in _costs(compared))]


def _law_row(row: Mapping[Any, Any]) -> dict[str, str]:
    return {
        "in question": str(row["question"]),
        "on": str(row["side"]),
        "target rows": str(row["target"]),
        "draft rows": str(row["draft"]),
        "toy, from the target's own law": _tiny(row["toy_own"]),
        "toy, from the law asked for": _tiny(row["toy_asked"]),
        "samples what was asked for": text.value_text(bool(row["samples_asked"])),
    }


def _tiny(value: float) -> str:
    if math.isnan(value):
        return text.UNDEFINED
    return "0" if value <= EXACT else f"{value:.3f}"


def _side_row(row: Mapping[Any, Any]) -> dict[str, str]:
    return {
        "in question": str(row["question"]),
        "K": str(row["num_draft_tokens"]),
        "on": str(row["side"]),
        "as asked for": text.value_text(bool(row["samples_asked"])),
        "off by": text.with_interval(row, "variation", 3) if not row["samples_asked"] else "0",
        "rate, unmasked": text.with_interval(row, "acceptance_rate_unmasked", 3),
        "rate, prefix": text.with_interval(row, "acceptance_rate", 3),
        "system efficiency": text.with_interval(row, "system_efficiency", 3),
        "acceptance length": text.with_interval(row, "acceptance_length"),
    }


_SHORT = dict(zip(METRICS, ("rate, unmasked", "rate, prefix", "system efficiency", "acceptance length"), strict=True))


def _comparison_rows(compared: pd.DataFrame) -> list[dict[str, str]]:
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in compared.to_dict("records"):
        key = (row["question"], row["num_draft_tokens"], row["one"], row["other"])
        shown = rows.setdefault(
            key,
            {
                "in question": str(row["question"]),
                "K": str(row["num_draft_tokens"]),
                "difference": f"{row['one']} − {row['other']}",
                "same law": text.value_text(bool(row["same_law"])),
            },
        )
        shown[_SHORT[row["metric"]]] = text.with_interval(row, "difference", 3, sign="+")
    return list(rows.values())


def _exactness(found: pd.DataFrame) -> list[str]:
    sentences = []
    rows = found.to_dict("records")
    for question in dict.fromkeys(row["question"] for row in rows):
        right, wrong = (
            [r for r in rows if (r["question"], r["samples_asked"]) == (question, a)] for a in (True, False)
        )
        if not wrong:
            sentences.append(f"{question}: all rows sample what was asked for.")
            continue
        low, high = min(row["variation_low"] for row in wrong), max(row["variation_high"] for row in wrong)
        values = [float(row["variation"]) for row in wrong]
        sentences.append(
            f"{question}: {_sides(right)} sample what was asked for; {_sides(wrong)} do not, by a total variation of "
            f"{min(values):.3f} to {max(values):.3f} per token (intervals within [{low:.3f}, {high:.3f}])."
        )
    return sentences


def _sides(rows: Sequence[Mapping[Any, Any]]) -> str:
    return " and ".join(f"*{side}*" for side in dict.fromkeys(row["side"] for row in rows))


def _costs(compared: pd.DataFrame) -> list[str]:
    """One sentence per question and comparison: what the intervals say of the unmasked rate and the length."""
    groups: dict[tuple[str, ...], dict[str, list[Mapping[Any, Any]]]] = {}
    for row in compared.to_dict("records"):
        group = groups.setdefault((row["question"], row["one"], row["other"]), {})
        group.setdefault(str(row["metric"]), []).append(row)
    shown = ("acceptance_rate_unmasked", "acceptance_length")
    return [
        f"{question}, *{one}* against *{other}*: "
        + "; ".join(f"{_SHORT[metric]} {_decided(by_metric[metric])}" for metric in shown)
        + "."
        for (question, one, other), by_metric in groups.items()
    ]


def _decided(rows: Sequence[Mapping[Any, Any]]) -> str:
    """Where a difference is lower, higher or undecided, by K."""
    kinds: dict[str, list[tuple[str, float]]] = {"lower": [], "higher": [], "undecided": []}
    for row in rows:
        kind = "undecided" if not row["excludes_zero"] else ("lower" if row["difference"] < 0 else "higher")
        kinds[kind].append((str(row["num_draft_tokens"]), abs(float(row["difference"]))))
    shown = []
    for kind, values in kinds.items():
        if not values:
            continue
        at = "K = " + ", ".join(k for k, _ in values)
        sizes = sorted(value for _, value in values)
        span = f"{sizes[0]:.3f}" if len(sizes) == 1 else f"{sizes[0]:.3f} to {sizes[-1]:.3f}"
        shown.append(f"{kind} at {at}" if kind == "undecided" else f"{kind} by {span} at {at}")
    return ", ".join(shown)
