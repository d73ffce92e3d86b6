"""What it costs in acceptance length to keep less of the draft law between drafting and verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from spectoolkit import files, metrics
from spectoolkit.datatypes import Dense, TopM
from spectoolkit.errors import UsageError
from spectoolkit.functional.memory import draft_law_bytes, key_value_bytes
from spectoolkit.report import storage as figures
from spectoolkit.report import tables, text
from spectoolkit.report.cells import CellResult
from spectoolkit.studies.output import compute, places, strategies, write
from spectoolkit.study import Cell, Store

TITLE = "Acceptance length over the bytes kept per draft token"
TEMPERATURE = "sampling.temperature"
VOCABULARIES = (32_000, 128_256, 151_936, 256_000)
SERVED = {
    "8B": {"num_layers": 32, "num_key_value_heads": 8, "head_dim": 128},
    "70B": {"num_layers": 80, "num_key_value_heads": 8, "head_dim": 128},
}
"""Shapes of the usual targets of these sizes: grouped-query attention with 8 key/value heads."""


def check(
    cells: Sequence[Cell], axes: Sequence[str], *, lower: str = "argmax", upper: str = "same_temperature"
) -> None:
    """Refuse names of strategies that no cell has, before any is computed.

    Raises:
        UsageError: names the strategies.
    """
    names = strategies(cells)
    for argument, name in (("lower", lower), ("upper", upper)):
        if name not in names:
            raise UsageError(
                f"study.{argument}: expected a strategy of the cells ({', '.join(dict.fromkeys(names))}), got {name!r}"
            )


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    lower: str = "argmax",
    upper: str = "same_temperature",
) -> str:
    """Compute the cells, then what each strategy wins back of what `lower` loses to `upper`.

    Writes recovered.csv (`recovered`) and server_memory.csv (`server_memory`) beside the usual tables.

    Args:
        lower, upper: names of strategies (`output.strategies`) between which the scale runs from 0 to 1.

    Raises:
        UsageError: `lower` or `upper` names no strategy, or the cells vary something else.
    """
    results = compute(cells, store, config)
    built = tables.build(results, axes)
    found, memory = recovered(results, lower, upper), server_memory()
    files.replace_text(store.folder / "recovered.csv", found.to_csv(index=False, lineterminator="\n"))
    files.replace_text(store.folder / "server_memory.csv", memory.to_csv(index=False, lineterminator="\n"))
    shown = [*findings(found, lower, upper), *memory_section(memory)]
    return write(store, cells, config, built, TITLE, figures.storage_figure(found, upper), shown)


def recovered(cells: Sequence[CellResult], lower: str, upper: str) -> pd.DataFrame:
    """Per temperature and strategy: bytes, pooled acceptance length AL, and the share of the loss that is won back.

        share = (AL - AL_lower) / (AL_upper - AL_lower)

    1 is as good as `upper`, 0 as bad as `lower`; above 1 is better than `upper`. Intervals are paired: every quantity
    of a resample comes from the same drawn prompts. NaN where the two ends are equal. `kept` says what of the draft law
    is kept: nothing, a part (some ids and probabilities) or the whole row.

    Raises:
        UsageError: see `run`.
    """
    names = strategies(cells)
    for argument, name in (("lower", lower), ("upper", upper)):
        if name not in names:
            raise UsageError(
                f"study.{argument}: expected one of the strategies {', '.join(dict.fromkeys(names))}, got {name!r}"
            )
    points = [{TEMPERATURE: c.settings[TEMPERATURE], "strategy": n} for c, n in zip(cells, names, strict=True)]
    found = places(points, (TEMPERATURE, "strategy"))
    rows: list[dict[str, Any]] = []
    for temperature in dict.fromkeys(point[TEMPERATURE] for point in points):
        here = [name for other, name in found if other == temperature]
        members = [cells[found[temperature, name]] for name in here]
        if lower not in here or upper not in here:
            raise UsageError(f"storage: expected {lower} and {upper} at every temperature, not both at {temperature}")
        values = metrics.resample([cell.rows for cell in members], "acceptance_length")
        bottom, top = here.index(lower), here.index(upper)
        for i, (name, cell) in enumerate(zip(here, members, strict=True)):
            span = metrics.interval(values.samples[:, i])
            share = metrics.difference(
                float(_share(values.estimates[None], i, bottom, top)[0]), _share(values.samples, i, bottom, top)
            )
            rows.append(
                {
                    TEMPERATURE: temperature,
                    "strategy": name,
                    "label": _label(cell.settings, name),
                    "kept": _kept(cell),
                    "draft_bytes_per_token": metrics.summarise(cell.rows)["draft_bytes_per_token"],
                    "acceptance_length": float(values.estimates[i]),
                    "acceptance_length_low": span.low,
                    "acceptance_length_high": span.high,
                    "share": share.estimate,
                    "share_low": share.low,
                    "share_high": share.high,
                }
            )
    return pd.DataFrame(rows)


def _share(values: np.ndarray, i: int, bottom: int, top: int) -> np.ndarray:
    """[R] of values [R, cells]; NaN where top and bottom are equal."""
    scale = values[:, top] - values[:, bottom]
    won = values[:, i] - values[:, bottom]
    return np.divide(won, scale, out=np.full(len(values), np.nan), where=np.abs(scale) > 1e-12)


def _kept(cell: CellResult) -> str:
    if not metrics.summarise(cell.rows)["draft_bytes_per_token"]:
        return "nothing"
    return "part" if cell.settings.get("drafter.name") == "top_m" else "whole row"


def _label(settings: Mapping[str, Any], strategy: str) -> str:
    """What stands in the figure: no more than tells a strategy from its neighbours there."""
    drafter, verifier = settings["drafter.name"], settings["verifier.name"]
    if drafter == "top_m" and verifier == "rejection":
        return f"m = {settings['drafter.keep']}"
    short = {("same_temperature", "rejection"): "whole row"}
    short |= {("same_temperature", rule): rule for rule in ("block", "match")}
    return short.get((drafter, verifier), strategy)


def findings(found: pd.DataFrame, lower: str, upper: str) -> list[str]:
    """Paragraphs of table.md about `recovered`."""
    shown = [
        {
            "temperature": text.value_text(row[TEMPERATURE]),
            "strategy": row["strategy"],
            "kept per draft token (bytes)": text.number(row["draft_bytes_per_token"], 0),
            "acceptance length": text.with_interval(row, "acceptance_length"),
            "share won back": text.with_interval(row, "share"),
        }
        for row in found.to_dict("records")
    ]
    explanation = (
        f"Share of the loss of {lower} against {upper} (1: as good as {upper}) that a strategy wins back, with "
        "intervals paired by prompt. Bytes at bf16. A verifier that looks at the draft tokens alone (match, coupled) "
        "needs nothing kept, whatever they were drawn from; the noise that coupled shares is a function of seed, "
        "request and position."
    )
    return ["## Won back", text.grid(shown), explanation]


def server_memory(
    num_requests: Sequence[int] = (64, 256),
    num_draft_tokens: int = 4,
    vocabularies: Sequence[int] = VOCABULARIES,
    keep: int = 16,
) -> pd.DataFrame:
    """Bytes of pending draft laws in bf16 beside those of the same tokens' keys and values, per N and vocabulary.

        whole rows    N K V 2
        top-m         N K m (4 + 2)              ids of 32 bits
        keys, values  N K 2 L H d 2              of an 8B and a 70B target (`SERVED`)

    Formulas: `functional.memory`.
    """
    rows = []
    nothing = torch.empty((1, 1, keep))
    for pending in num_requests:
        for vocabulary in vocabularies:
            dense = Dense(nothing).bytes_per_token(vocabulary)
            sparse = TopM(nothing, nothing).bytes_per_token(vocabulary)
            row = {"num_requests": pending, "num_draft_tokens": num_draft_tokens, "vocab_size": vocabulary}
            row["dense_bytes"] = draft_law_bytes(pending, num_draft_tokens, dense)
            row[f"top_{keep}_bytes"] = draft_law_bytes(pending, num_draft_tokens, sparse)
            for name, shape in SERVED.items():
                row[f"key_value_{name}_bytes"] = key_value_bytes(pending, num_draft_tokens, **shape)
            rows.append(row)
    return pd.DataFrame(rows)


def memory_section(memory: pd.DataFrame) -> list[str]:
    """Paragraphs of table.md about `server_memory`; MB are 10^6 bytes."""
    heads = {
        name: name.removesuffix("_bytes").replace("_", " ") + " (MB)" for name in memory if name.endswith("_bytes")
    }
    shown = [
        {"pending requests": f"{row['num_requests']}", "vocabulary": f"{row['vocab_size']:,}"}
        | {head: text.number(row[name] / 1e6) for name, head in heads.items()}
        for row in memory.to_dict("records")
    ]
    explanation = (
        f"Arithmetic, not measured: {memory['num_draft_tokens'].iloc[0]} draft tokens for each pending request, bf16. "
        "Whole rows: N K V 2 bytes; top-m: N K m (4 + 2); keys and values of the same draft tokens in the target: "
        "N K 2 L H d 2 with H = 8, d = 128, and L = 32 (8B) or 80 (70B)."
    )
    return ["## On a server", text.grid(shown), explanation]
