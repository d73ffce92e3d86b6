"""Which layers of a target to leave out, so that the rest drafts well: the set behind `draft_model=layer_skip`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.functional.theory import expected_acceptance_length
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.layer_skip import layer_skip_search
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.runner import completions_of
from spectoolkit.study import Cell, Store

RUNS_IN_ONE_PROCESS = True  # one search, each step of which needs the ones before


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    max_skipped: int = 5,
) -> str:
    """Sample text from the target, then leave out one layer after the other (`models.layer_skip.layer_skip_search`).

    The text is decoded by the cell, whose verifier must be lossless: then it has the target's law.

    Raises:
        UsageError: a target that is not one of transformers, more than one cell, a lossy verifier, or T = 0 (a greedy
            overlap says little).
    """
    experiment = cells[0].build()
    temperature, target = config["sampling"]["temperature"], experiment.target
    if not isinstance(target, CausalLM):
        raise UsageError(f"layer_skip_search: expected a target of transformers, got {target.name}")
    if len(cells) != 1 or not experiment.verifier.is_lossless or temperature == 0:
        raise UsageError(
            "layer_skip_search: expected one cell with a lossless verifier and sampling.temperature > 0, got "
            f"{len(cells)} cells, {type(experiment.verifier).__name__} and temperature {temperature}"
        )
    with progress_bar(len(experiment.requests), "request") as bar:
        completions = []
        for completion in completions_of(experiment):
            completions.append(completion)
            bar.update(1)
    sequences = [[*one.request.prompt, *one.tokens] for one in completions]
    counted = [[False] * len(one.request.prompt) + [True] * len(one.tokens) for one in completions]
    with progress_bar(None, "candidate") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = layer_skip_search(target, sequences, counted, temperature, max_skipped, progress=show)
    num_tokens = sum(map(sum, counted))
    k = experiment.num_draft_tokens
    table = pd.DataFrame(
        [
            {
                "num_skipped": len(layers),
                "skipped_layers": " ".join(map(str, layers)),
                "overlap": overlap,
                "expected_acceptance_length": expected_acceptance_length(overlap, k),
            }
            for layers, overlap in found
        ]
    )
    text = _markdown(table, str(config["name"]), temperature, num_tokens, k)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    store.write_manifest({"provenance": provenance(), "config": config, "counted_tokens": num_tokens})
    return f"{text}\nTable and manifest are in {store.folder}"


def _markdown(table: pd.DataFrame, name: str, temperature: float, num_tokens: int, k: int) -> str:
    lines = [
        f"# {name}",
        "",
        f"Greedy search on {num_tokens:,} tokens sampled from the target at T = {temperature}. *Overlap* is the mean "
        "of sum_x min(p(x), q(x)), teacher-forced: the acceptance rate of rejection sampling at a position. The last "
        f"column is what that rate would give at K = {k} if it were the same at every position.",
        "",
        "| layers left out | which, in the order in which they went | overlap | (1 - a^(K+1)) / (1 - a) |",
        "|---:|---|---:|---:|",
    ]
    for row in table.to_dict("records"):
        lines.append(
            f"| {row['num_skipped']} | {row['skipped_layers']} | {row['overlap']:.3f} | "
            f"{row['expected_acceptance_length']:.2f} |"
        )
    return "\n".join(lines) + "\n"
