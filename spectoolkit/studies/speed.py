"""Whether drafting pays in time: tokens per second of live decoding over plain decoding, within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.report import contours, plots
from spectoolkit.runner import completions_of
from spectoolkit.study import Cell, Experiment, Store

RUNS_IN_ONE_PROCESS = True  # times are compared within one process


def check(cells: Sequence[Cell], axes: Sequence[str], **parameters: Any) -> None:
    """Refuse cells without plain decoding to compare with.

    Raises:
        UsageError: no cell with drafter=none at some batch size, or a replayed cell.
    """
    sizes = {cell.settings["batch_size"] for cell in cells}
    plain = {cell.settings["batch_size"] for cell in cells if cell.settings["drafter.name"] == "none"}
    if sizes != plain:
        raise UsageError(
            f"speed: expected a cell with drafter=none at every batch size {sorted(sizes)}, got {sorted(plain)}"
        )
    if any(cell.engine != "live" for cell in cells):
        raise UsageError("speed: expected engine=live, since a replay takes no time that says anything about decoding")


def run(
    cells: Sequence[Cell], store: Store, *, axes: Sequence[str], config: Mapping[str, Any], repetitions: int = 5
) -> str:
    """Decode every cell `repetitions` times, all of them by turns; medians of the ratios within a turn count.

    Raises:
        UsageError: fewer than one repetition.
    """
    turns = by_turns([cell.build() for cell in cells], repetitions)
    plain = {c.settings["batch_size"]: i for i, c in enumerate(cells) if c.settings["drafter.name"] == "none"}
    rows = []
    for i, cell in enumerate(cells):
        base = plain[cell.settings["batch_size"]]
        over = [turn[i]["tokens_per_s"] / turn[base]["tokens_per_s"] for turn in turns]
        costs = [turn[i]["draft_token_s"] / turn[base]["forward_s"] for turn in turns]
        scoring = [turn[i]["forward_s"] / turn[base]["forward_s"] for turn in turns]
        rows.append(
            {
                "drafter": cell.settings["drafter.name"],
                "verifier": cell.settings["verifier.name"],
                "batch_size": cell.settings["batch_size"],
                "speedup": statistics.median(over),
                "speedup_low": min(over),
                "speedup_high": max(over),
                "draft_cost": statistics.median(costs),
                "draft_cost_low": min(costs),
                "draft_cost_high": max(costs),
                "scoring_cost": statistics.median(scoring),
                "acceptance_length": turns[0][i]["acceptance_length"],
                "tokens_per_s": statistics.median(turn[i]["tokens_per_s"] for turn in turns),
            }
        )
    table, notes = pd.DataFrame(rows).sort_values("batch_size", kind="stable"), provenance()
    text = _markdown(table, config, str(cells[0].settings["draft_model.name"]), str(notes["device"]), repetitions)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    plots.save(figure(table, int(config["num_draft_tokens"])), store.folder)
    store.write_manifest({"provenance": notes, "config": config})
    return f"{text}\nTable, figure and manifest are in {store.folder}"


def figure(table: pd.DataFrame, num_draft_tokens: int) -> Figure:
    """The speed-up that acceptance length and draft cost let expect, with every strategy at its place, by batch size.

    What the measured speed-up lacks is what the formula leaves out: scoring costs more than a forward over one token.

    Args:
        table: of `run`; plain decoding, which drafts nothing, has no place.
        num_draft_tokens: K.
    """
    drafting = pd.DataFrame(table[table["drafter"] != "none"])
    found = drafting.rename(columns={f"draft_cost{end}": f"cost{end}" for end in ("", "_low", "_high")})
    names = [
        drafter if verifier == "rejection" else f"{drafter}, {verifier}"
        for drafter, verifier in zip(found["drafter"].tolist(), found["verifier"].tolist(), strict=True)
    ]
    points = contours.measured_points(found.assign(strategy=names, num_draft_tokens=num_draft_tokens))
    points["batch"] = [f"batch size {size}" for size in found["batch_size"].tolist()]
    return contours.contours_figure(points, "batch" if len(set(points["batch"].tolist())) > 1 else None)


def by_turns(experiments: Sequence[Experiment], repetitions: int) -> list[list[dict[str, float]]]:
    """Turns of the experiments, each decoded once per turn after a first time that does not count.

    What is measured, per turn and experiment: `tokens_per_s` of wall clock; `acceptance_length`; seconds per row and
    step `step_s` and of its target forward `forward_s`; per draft token `draft_token_s`; `verify_share`, the verifier's
    part of the steps. A slow moment of the machine hits neighbours alike, so ratios are to be taken within a turn.

    Raises:
        UsageError: fewer than one repetition.
    """
    if repetitions < 1:
        raise UsageError(f"study.repetitions: expected an integer >= 1, got {repetitions}")
    for experiment in experiments:  # first calls are slow, and prefills are kept from now on
        _decode(experiment)
    turns: list[list[dict[str, float]]] = []
    with progress_bar(len(experiments) * repetitions, "run") as bar:
        for _ in range(repetitions):
            turn = []
            for experiment in experiments:
                turn.append(_decode(experiment))
                bar.update(1)
            turns.append(turn)
    return turns


def _decode(experiment: Experiment) -> dict[str, float]:
    if experiment.target.device.type == "cuda":
        torch.cuda.synchronize(experiment.target.device)
    begin = time.perf_counter()
    completions = list(completions_of(experiment))
    wall_s = time.perf_counter() - begin
    steps = [step for completion in completions for step in completion.steps]
    emitted, drafted = sum(step.emitted for step in steps), sum(step.drafted for step in steps)
    verify_s = sum(step.verify_s for step in steps)
    total_s = verify_s + sum(step.draft_s + step.target_s for step in steps)
    return {
        "tokens_per_s": emitted / wall_s,
        "acceptance_length": emitted / len(steps),
        # Shares of a batch's step: both are costs per row.
        "draft_token_s": sum(step.draft_s for step in steps) / drafted if drafted else 0.0,
        "forward_s": sum(step.target_s for step in steps) / len(steps),
        "step_s": total_s / len(steps),
        "verify_share": verify_s / total_s,
    }


def _markdown(table: pd.DataFrame, config: Mapping[str, Any], draft_model: str, device: str, repetitions: int) -> str:
    lines = [
        f"# {config['name']}",
        "",
        f"Medians of {repetitions} turns on {device}, in brackets the least and the most; draft model {draft_model}, "
        f"K = {config['num_draft_tokens']}, T = {config['sampling']['temperature']}, {config['max_new_tokens']} tokens "
        "per request. *Speed-up*: tokens per second over plain decoding in the same turn, prefills kept from the turn "
        "before. *Draft token*: time to draft one token (forward, sampling parameters, draw) over that of one target "
        "forward of plain decoding. *Scoring*: the target's forward over K + 1 tokens over that of one token.",
        "",
        "| batch | drafter | verifier | speed-up | draft token | scoring | acceptance length |",
        "|---:|---|---|---|---:|---:|---:|",
    ]
    for row in table.to_dict("records"):
        lines.append(
            f"| {row['batch_size']} | {row['drafter']} | {row['verifier']} | {row['speedup']:.2f} "
            f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}] | {row['draft_cost']:.2f} | "
            f"{row['scoring_cost']:.2f} | {row['acceptance_length']:.2f} |"
        )
    return "\n".join(lines) + "\n"
