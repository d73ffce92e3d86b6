"""Whether every pair of drafter and verifier emits the target's law: lossless rules proven, wrong ones caught."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from spectoolkit.errors import RunError, UsageError
from spectoolkit.exactness import audit
from spectoolkit.exactness.audit import Finding, claim_of, control_of
from spectoolkit.exactness.calibrated import cells as cells_of
from spectoolkit.exactness.calibrated import combined, sample_test, smallest_detectable
from spectoolkit.exactness.proof import Proof, prove
from spectoolkit.exactness.target_law import Continuations, most_probable
from spectoolkit.files import replace, replace_text
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.report import text
from spectoolkit.report.cells import CellResult, axis_columns
from spectoolkit.studies.output import compute
from spectoolkit.study import Cell, Store

ROUNDED = ("bfloat16", "float16", "auto")


@dataclass(frozen=True)
class Sampled:
    """Test of a cell's outputs: p-value, distances per prompt, and what would have been detected."""

    p_value: float
    distance: float
    expected_distance: float
    smallest_detectable: float


def check(
    cells: Sequence[Cell],
    axes: Sequence[str],
    *,
    quick: bool = False,
    partners: Mapping[str, Sequence[str]] | None = None,
    num_cells: int = 64,
    false_alarm: float = 1e-6,
    power: float = 0.999,
) -> None:
    """Refuse what the test could not judge.

    Raises:
        UsageError: probabilities outside (0, 1), no cells, or (unless `quick`) replayed cells, stop strings, or a
            target whose rounding depends on the shape of a forward pass and would show.
    """
    for name, value in (("false_alarm", false_alarm), ("power", power)):
        if not 0 < value < 1:
            raise UsageError(f"study.{name}: expected a number between 0 and 1, got {value!r}")
    if unknown := sorted((partners or {}).keys() - {"drafter", "verifier"}):
        raise UsageError(f"study.partners: expected names under drafter and verifier, got {', '.join(unknown)}")
    if num_cells < 1:
        raise UsageError(f"study.num_cells: expected an integer >= 1, got {num_cells!r}")
    for cell in [] if quick else cells:
        if cell.engine != "live":
            raise UsageError(f"exactness: expected engine=live, since outputs have to be decoded, got {cell.engine}")
        if cell.settings["stop_strings"]:
            raise UsageError("exactness: expected no stop_strings, since the target's law of a text is not computed")
        if cell.settings.get("target.dtype") in ROUNDED:
            raise UsageError(
                "exactness: expected a target in float32 or float64, as rounding to fewer digits depends on the shape "
                f"of a forward pass and a sharp test sees it; got target.dtype={cell.settings['target.dtype']}; say "
                "target.dtype=float32, or study.quick=true for the toys alone"
            )


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    quick: bool = False,
    partners: Mapping[str, Sequence[str]] | None = None,
    num_cells: int = 64,
    false_alarm: float = 1e-6,
    power: float = 0.999,
) -> str:
    """Enumerate every pair on toys; unless `quick`, decode samples of pairs and test them against the target's own law.

    A lossy rule has no claim that samples could contradict, and is not sampled.

    Args:
        quick: leave the target out; nothing is loaded.
        partners: "drafter" and "verifier" -> names. In an audit of all drafters with all verifiers the pairs with one
            of these on its side are sampled, so that every part runs through the engine, and not once with each other
            part. None samples every pair that makes a claim, as does naming a drafter or a verifier.
        num_cells: most probable outputs of a prompt that are counted one by one.
        false_alarm: probability that any pair of the table is rejected although it is lossless; every p-value is
            compared with its share (Bonferroni).
        power: probability with which `smallest_detectable` is detected.

    Raises:
        RunError: a lossless claim fails, or a rule that is wrong on purpose is not caught; the table is written.
    """
    store.check_owner(config)
    cells = [cell for cell in cells if not getattr(cell.pair_on(None, 0)[0], "is_judged_by_another_law", False)]
    if not cells:
        raise UsageError("exactness: expected a drafter whose output is judged by the law of the request, got none")
    proofs = _proofs(cells)
    if not {"drafter", "verifier"} <= set(axes):
        partners = None
    tested = [] if quick else [i for i, cell in enumerate(cells) if _is_sampled(cell, partners)]
    level = false_alarm / max(1, len(tested))
    sampled: list[Sampled | None] = [None] * len(cells)
    if tested:
        results = compute([cells[i] for i in tested], store, config)
        for i, test in zip(tested, _sampled([cells[i] for i in tested], results, num_cells, level, power), strict=True):
            sampled[i] = test
    findings = [_finding(cell, proof, test, level) for cell, proof, test in zip(cells, proofs, sampled, strict=True)]
    table = _table(cells, axes, findings, sampled)
    notes = _notes(findings, sampled, false_alarm, power, config)
    shown = "\n\n".join([f"# {config['name']}", text.grid(_shown(table, axes, quick)), *notes]) + "\n"
    replace_text(store.folder / "table.md", shown)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace(store.folder / "table.parquet", lambda path: table.to_parquet(path, index=False))
    described = store.describe([cells[i] for i in tested])
    store.write_manifest({"provenance": provenance(), "config": config, "cells": described})
    # A control need not be wrong with every partner, so all partners of one part say nothing of those among them.
    is_one_sided = len({"drafter", "verifier"} & set(axes)) == 1
    if wrong := audit.failures(findings, judges_controls=not is_one_sided):
        raise RunError("\n".join(["exactness: claims do not hold", *wrong, f"(the table: {store.folder}/table.md)"]))
    return f"{shown}\nTable and manifest are in {store.folder}"


def _is_sampled(cell: Cell, partners: Mapping[str, Sequence[str]] | None) -> bool:
    makes_claim = claim_of(*cell.pair_on(None, 0)) != audit.LOSSY
    if partners is None:
        return makes_claim
    return makes_claim and any(cell.settings[f"{side}.name"] in names for side, names in partners.items())


def _proofs(cells: Sequence[Cell], two_steps_tokens: int = 2) -> list[Proof]:
    """One per cell; cells that differ in neither drafter nor verifier share theirs."""
    found: dict[str, Proof] = {}
    keys = [_key(cell, ("drafter.", "verifier.")) for cell in cells]
    with progress_bar(len(cells), "pair") as bar:
        for cell, key in zip(cells, keys, strict=True):
            if key not in found:
                found[key] = prove(cell.pair_on, two_steps_tokens=two_steps_tokens)
            bar.update(1)
    return [found[key] for key in keys]


def proven(cells: Sequence[Cell], *, two_steps_tokens: int = 2) -> list[Finding]:
    """What enumeration on toys says of each cell's pair (`exactness.proof.prove`); nothing is decoded."""
    proofs = _proofs(cells, two_steps_tokens)
    return [_finding(cell, proof, None, 0.0) for cell, proof in zip(cells, proofs, strict=True)]


def _key(cell: Cell, groups: tuple[str, ...]) -> str:
    chosen = {key: value for key, value in cell.settings.items() if key.startswith(groups)}
    return json.dumps(chosen, sort_keys=True, default=str)


def _sampled(
    cells: Sequence[Cell], results: Sequence[CellResult], num_cells: int, level: float, power: float
) -> list[Sampled]:
    laws: dict[str, dict[str, Continuations]] = {}
    found = []
    with progress_bar(len(cells), "test") as bar:
        for cell, result in zip(cells, results, strict=True):
            key = json.dumps(cell.text_identity, sort_keys=True, default=str)
            if key not in laws:
                laws[key] = _laws(cell, num_cells)
            found.append(_test(result.rows, laws[key], level, power))
            bar.update(1)
    return found


def _laws(cell: Cell, num_cells: int) -> dict[str, Continuations]:
    """The target's law of the output, per prompt of a cell."""
    experiment = cell.build()
    first = {experiment.clusters[request.id]: request for request in reversed(experiment.requests)}
    return {cluster: most_probable(experiment.target, request, num_cells) for cluster, request in first.items()}


def _test(rows: pd.DataFrame, laws: Mapping[str, Continuations], level: float, power: float) -> Sampled:
    tests, detectable = [], []
    for cluster, group in rows.groupby("cluster", sort=True):
        outputs = Counter(tuple(int(token) for token in tokens) for tokens in group["tokens"])
        counts, probs = cells_of(outputs, laws[str(cluster)])
        tests.append(sample_test(counts, probs))
        detectable.append(smallest_detectable(probs, len(group), level / len(laws), power))
    worst = max(tests, key=lambda test: test.distance - test.expected_distance)
    return Sampled(combined(tests), worst.distance, worst.expected_distance, max(detectable))


def _finding(cell: Cell, proof: Proof, sampled: Sampled | None, level: float) -> Finding:
    drafter, verifier = cell.pair_on(None, 0)
    names = (str(cell.settings["drafter.name"]), str(cell.settings["verifier.name"]))
    return Finding(
        *names,
        control=control_of(drafter, verifier, *names),
        claim=claim_of(drafter, verifier),
        proof=proof,
        p_value=None if sampled is None else sampled.p_value,
        smallest_detectable=None if sampled is None else sampled.smallest_detectable,
        level=level,
    )


def _table(
    cells: Sequence[Cell], axes: Sequence[str], findings: Sequence[Finding], sampled: Sequence[Sampled | None]
) -> pd.DataFrame:
    """One row per pair, unrounded."""
    columns: dict[str, Sequence[Any]] = {group: axis_columns(cells, group)[group] for group in ("drafter", "verifier")}
    columns |= {axis: axis_columns(cells, axis)[axis] for axis in axes if axis not in columns}
    of: dict[str, Callable[[Finding], Any]] = {
        "claim": lambda one: one.claim,
        "one_step": lambda one: one.proof.one_step,
        "two_steps": lambda one: one.proof.two_steps,
        "how": lambda one: one.proof.how,
        "p_value": lambda one: one.p_value,
        "smallest_detectable": lambda one: one.smallest_detectable,
    }
    table = pd.DataFrame(columns | {name: [get(one) for one in findings] for name, get in of.items()})
    table["sampled_distance"] = [None if one is None else one.distance for one in sampled]
    table["expected_distance"] = [None if one is None else one.expected_distance for one in sampled]
    table["level"] = [one.level for one in findings]
    table["verdict"] = [one.verdict for one in findings]
    numbers = ["one_step", "two_steps", "p_value", "smallest_detectable", "sampled_distance", "expected_distance"]
    return table.astype(dict.fromkeys(numbers, "float64"))


def _shown(table: pd.DataFrame, axes: Sequence[str], quick: bool) -> list[dict[str, str]]:
    names = ["drafter", "verifier", *(axis for axis in axes if axis not in ("drafter", "verifier"))]
    rows = []
    for row in table.to_dict("records"):
        shown = {text.short(name): text.value_text(row[name]) for name in names} | {"claim": row["claim"]}
        shown |= {"TV, one step": _tv(row["one_step"]), "TV, two steps": _tv(row["two_steps"])}
        if not quick:
            p_value = text.UNDEFINED if pd.isna(row["p_value"]) else f"{row['p_value']:.2g}"
            shown |= {"p-value": p_value, "detects TV": text.number(row["smallest_detectable"], 3)}
        rows.append(shown | {"verdict": row["verdict"]})
    return rows


def _tv(value: float) -> str:
    if pd.isna(value):
        return text.UNDEFINED
    return f"{value:.0e}" if value < 1e-3 else f"{value:.3f}"


def _notes(
    findings: Sequence[Finding],
    sampled: Sequence[Sampled | None],
    false_alarm: float,
    power: float,
    config: Mapping[str, Any],
) -> list[str]:
    ways = Counter(one.proof.how for one in findings)
    notes = [
        "*TV* is the total variation between the emitted and the target's law on random toys, after one step and after "
        "two: every box of uniforms on which the drafter's and the verifier's own code branches alike is integrated. "
        "Noise over the vocabulary that drafter and verifier share is enumerated for two tokens. "
        + "; ".join(f"{how}: {count} of {len(findings)}" for how, count in ways.items()) + "."
    ]  # fmt: skip
    if num_sampled := sum(test is not None for test in sampled):
        notes.append(
            f"*p-value*, of {num_sampled} pairs: {config['samples_per_prompt']:,} outputs of "
            f"{config['max_new_tokens']} tokens per prompt, decoded, against the target's own "
            f"probabilities. Rejected below {findings[0].level:.2g}, so that the "
            f"whole table has a false alarm with probability {false_alarm:g} at most; *detects TV*: any law at least "
            f"so far from the target's is rejected with probability {power:g} (`spectoolkit/exactness/calibrated.py`)."
        )
    counts = Counter(one.verdict.split(":")[0] for one in findings)
    notes.append("Verdicts: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".")
    return notes
