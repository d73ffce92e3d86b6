"""What a grid costs by replay: against sampling the outputs it reads, and against decoding every cell.

Every ratio is taken within one run; the decoding of the whole grid is extrapolated from the cells that were decoded.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.replay import Strategy, replay
from spectoolkit.runner import completions_of, sample
from spectoolkit.study import Cell, Experiment, Store
from spectoolkit.trajectories import Trajectories

RUNS_IN_ONE_PROCESS = True  # times are compared within one process


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    num_live_cells: int = 4,
) -> str:
    """Sample and replay the cells group by group (those that read the same outputs), and decode some of them live.

    Each cell counts K = 1 .. num_draft_tokens times, since a replay gives all of them at once. Nothing is stored but
    the timings.

    Args:
        num_live_cells: how many cells are decoded, spread evenly over the grid.

    Raises:
        UsageError: a cell that is not replayed.
    """
    if any(cell.engine != "replay" for cell in cells):
        raise UsageError("replay_benchmark: expected cells with engine=replay only")
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(cell.text_identity, sort_keys=True, default=str), []).append(cell)
    timings: list[dict[str, Any]] = []
    total = sum(2 * group[0].num_requests for group in groups.values()) + num_live_cells * cells[0].num_requests
    with progress_bar(total, "request") as bar:
        for group in groups.values():
            experiments = [cell.build() for cell in group]
            first = experiments[0]
            # Models, kernels and kept prompts are warm for what follows, as they are in a study of many cells.
            first.target.prefill([request.prompt[:-1] for request in first.requests])
            outputs, sample_s = _timed(lambda first=first: sample(first, bar))
            strategies = [Strategy(e.drafter, e.verifier, e.num_draft_tokens) for e in experiments]
            half = _first_half(outputs)
            forget_peak()
            replay(first.target, strategies, half)
            peak_of_half = peak_mib()
            forget_peak()
            _, replay_s = _timed(lambda f=first, s=strategies, o=outputs: replay(f.target, s, o, bar.update))
            timings.append(
                {
                    "sampling.temperature": group[0].settings["sampling.temperature"],
                    "strategies": len(group),
                    "cells": sum(e.num_draft_tokens for e in experiments),
                    "tokens": sum(map(len, outputs.outputs)),
                    "sample_s": sample_s,
                    "replay_s": replay_s,
                    "peak_mib": peak_mib(),
                    "peak_growth_from_half_to_all_mib": peak_mib() - peak_of_half,
                }
            )
        step = max(1, len(cells) // num_live_cells)
        live_s = [_timed(lambda c=cell: _decode(c.build(), bar))[1] for cell in cells[::step][:num_live_cells]]
    found = _summary(timings, live_s)
    text = _markdown(timings, found, str(provenance()["device"]))
    replace_text(store.folder / "table.md", text)
    replace_text(store.folder / "table.json", json.dumps({**found, "groups": timings}, indent=2) + "\n")
    store.write_manifest({"provenance": provenance(), "config": config})
    return f"{text}\nTable and manifest are in {store.folder}"


def _summary(timings: Sequence[Mapping[str, Any]], live_s: Sequence[float]) -> dict[str, float]:
    sampled, replayed = sum(t["sample_s"] for t in timings), sum(t["replay_s"] for t in timings)
    num_cells = sum(t["cells"] for t in timings)
    decoded = num_cells * sum(live_s) / len(live_s)
    return {
        "cells": num_cells,
        "live_cells_measured": len(live_s),
        "replay_over_sampling": replayed / sampled,
        "decoding_over_replay": decoded / (sampled + replayed),
        "peak_growth_mib": max(t["peak_growth_from_half_to_all_mib"] for t in timings),
    }


def _markdown(timings: Sequence[Mapping[str, Any]], found: Mapping[str, float], device: str) -> str:
    lines = [
        "# Replay benchmark",
        "",
        f"{found['cells']} cells (strategies x K x temperatures) on {device}.",
        "",
        "| temperature | strategies | cells | output tokens | sampling (s) | replay (s) | replay / sampling | "
        "peak memory of the replay (MiB) | against half of the outputs (MiB) |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for t in timings:
        lines.append(
            f"| {t['sampling.temperature']} | {t['strategies']} | {t['cells']} | {t['tokens']:,} | "
            f"{t['sample_s']:.1f} | {t['replay_s']:.1f} | {t['replay_s'] / t['sample_s']:.2f} | "
            f"{t['peak_mib']:.0f} | {t['peak_growth_from_half_to_all_mib']:+.0f} |"
        )
    lines += [
        "",
        f"Replaying the grid costs {found['replay_over_sampling']:.2f} times the sampling of its outputs. Decoding it "
        f"would cost {found['decoding_over_replay']:.0f} times as much as sampling and replaying it (extrapolated from "
        f"{found['live_cells_measured']} decoded cells at the largest K).",
    ]
    return "\n".join(lines) + "\n"


def _decode(experiment: Experiment, bar: Any) -> None:
    for _ in completions_of(experiment):
        bar.update(1)


def _first_half(outputs: Trajectories) -> Trajectories:
    half = (len(outputs.outputs) + 1) // 2
    return with_changes(
        outputs,
        requests=outputs.requests[:half],
        outputs=outputs.outputs[:half],
        finish_reasons=outputs.finish_reasons[:half],
    )


def _timed(action: Any) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = action()
    return result, time.perf_counter() - begin


def forget_peak() -> None:
    """Let `peak_mib` begin anew (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """The process's largest resident memory since `forget_peak`; NaN where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), math.nan)
