"""A part of `kernel_benchmark`: what a replay's reduction takes on a CPU, against the plain expression in torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor

from spectoolkit.datatypes import SamplingParams
from spectoolkit.drafters import ModelDrafter
from spectoolkit.files import replace_text
from spectoolkit.functional.conditional import given_coupled, given_rejection
from spectoolkit.kernels.replay_reduction import Reduce, Reducer
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.replay import BATCH
from spectoolkit.sampling import SamplingState
from spectoolkit.studies.engine_benchmark import median_and_range, shown_range
from spectoolkit.study import Store

DTYPE = torch.bfloat16

TEMPERATURES = tuple(0.1 * (i + 1) for i in range(16))

REDUCTIONS: Mapping[str, Reduce] = {"rejection": given_rejection, "coupled": given_coupled}


def run_on_cpu(
    store: Store, config: Mapping[str, Any], vocab_sizes: Sequence[int], num_rows: Sequence[int], repetitions: int
) -> str:
    """Compare them at every vocabulary size and number of rows.

    Writes `reduction_on_cpu.csv`, `table.md` and `manifest.json`.
    """
    rows = []
    sizes = [(vocab_size, num) for vocab_size in vocab_sizes for num in num_rows]
    with progress_bar(len(sizes) * len(REDUCTIONS), "case") as bar:
        for vocab_size, num in sizes:
            for rule, reduce in REDUCTIONS.items():
                case = ReplayCase.of(num, vocab_size, config["sampling"]["temperature"])
                rows.append({"rule": rule, **reduction_on_cpu(case, reduce, repetitions)})
                bar.update(1)
    table, notes = pd.DataFrame(rows), provenance()
    text = _markdown_of_cpu(table, config, str(notes["device"]), repetitions)
    replace_text(store.folder / "reduction_on_cpu.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    store.write_manifest({"provenance": notes, "config": config})
    return f"{text}\nTables and manifest are in {store.folder}"


@dataclass(frozen=True)
class ReplayCase:
    """A chunk of a replay at many draft temperatures on a CPU, from random logits [B, Q, V]."""

    target: Tensor
    draft: Tensor
    tokens: Tensor
    sampling: SamplingState

    @staticmethod
    def of(num_rows: int, vocab_size: int, temperature: float) -> ReplayCase:
        """B is a replay's, so that Q is `num_rows` / B, rounded up."""
        size = min(BATCH, num_rows)
        shape = (size, -(-num_rows // size), vocab_size)
        generator = torch.Generator().manual_seed(1)
        target = (3 * torch.randn(shape, generator=generator)).to(DTYPE)
        ids, params = [str(i) for i in range(size)], [SamplingParams(temperature=temperature)] * size
        return ReplayCase(
            target=target,
            draft=(target + torch.randn(shape, generator=generator)).to(DTYPE),
            tokens=target.argmax(-1),
            sampling=SamplingState.of(ids, params, [(0,)] * size, [()] * size, vocab_size),
        )


def reduction_on_cpu(case: ReplayCase, reduce: Reduce, repetitions: int) -> dict[str, Any]:
    """The reduction as a replay makes it, and the plain expressions, called in turn.

    Of every number, the median over the repetitions, and its smallest and largest value; ratios are taken within one.
    `plain` gives the same numbers: softmax of both rows, p(x) and q(x), and from them the rule's number, the target's
    row made once. `plain_with_overlap` takes the sum of min(p, q) at every draft temperature besides.
    """
    vocab_size = case.target.shape[-1]
    x, temperature = case.tokens[..., None], case.sampling.params.temperature.float()[:, None, None]
    drafters = [ModelDrafter(cast(Any, None), vocab_size, constant=t) for t in TEMPERATURES]  # none is asked to draft
    strategies = {i: (drafter, reduce) for i, drafter in enumerate(drafters)}

    def by_replay() -> Tensor:
        reducer = Reducer(case.sampling, case.target, case.tokens, case.tokens[:, :-1])
        return torch.stack(list(reducer.reduce(strategies, case.draft).values()), -1)

    def plain(*, with_overlap: bool = False) -> Tensor:
        p = torch.softmax(case.target.float() / temperature, -1)
        target, logits, results = p.gather(-1, x), case.draft.float(), []
        for t in TEMPERATURES:
            q = torch.softmax(logits / t, -1)
            draft = q.gather(-1, x)
            if with_overlap:
                torch.minimum(p, q).sum(-1)
            if reduce is given_coupled:
                results.append(1 / torch.maximum(p, q * (target / draft)).sum(-1))
            else:
                results.append((draft / target).clamp(max=1).squeeze(-1))
        return torch.stack(results, -1)

    calls = {"replay": by_replay, "plain": plain, "plain_with_overlap": lambda: plain(with_overlap=True)}
    found, expected = by_replay(), plain().double()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    numbers = {f"{name}_s": times for name, times in seconds.items()}
    for name in ("plain", "plain_with_overlap"):
        numbers[f"{name}_over_replay"] = [a / b for a, b in zip(seconds[name], seconds["replay"], strict=True)]
    return {
        "vocab_size": vocab_size,
        "rows": case.tokens.numel(),
        "temperatures": len(TEMPERATURES),
        "largest_relative_difference": float(((found - expected).abs() / expected.clamp(min=1e-30)).max()),
        **{key: value for name, values in numbers.items() for key, value in median_and_range(name, values).items()},
    }


def _markdown_of_cpu(table: pd.DataFrame, config: Mapping[str, Any], device: str, repetitions: int) -> str:
    lines = [
        "# Kernel benchmark: a replay's reduction on a CPU",
        "",
        f"{device}; logits in bfloat16, T = {config['sampling']['temperature']}; medians of {repetitions} "
        "repetitions in turn, smallest and largest value in brackets. No kernel runs here, and no GPU is measured.",
        "",
        "| rule | V | rows | draft temperatures | replay (ms) | plain (ms) | plain / replay | "
        "plain with sum of min / replay | largest relative difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.to_dict("records"):
        in_ms = {key: row[key] * 1e3 for key in row if str(key).startswith(("replay_s", "plain_s"))}
        lines.append(
            f"| {row['rule']} | {row['vocab_size']:,} | {row['rows']} | {row['temperatures']} | "
            f"{shown_range(in_ms, 'replay_s', 0)} | {shown_range(in_ms, 'plain_s', 0)} | "
            f"{shown_range(row, 'plain_over_replay', 2)} | {shown_range(row, 'plain_with_overlap_over_replay', 2)} | "
            f"{row['largest_relative_difference']:.0e} |"
        )
    return "\n".join([*lines, "", _EXPLANATION_OF_CPU]) + "\n"


_EXPLANATION_OF_CPU = (
    "*replay*: the reduction as `engine=replay` makes it, some rows at a time, with its checks of the logits. *plain*: "
    "softmax(p) once, then at every draft temperature softmax(q) of all rows, the two probabilities of the token, and "
    "from them the same number. *sum of min*: the plain expression with the sum of min(p, q) at every temperature, "
    "which a replay does not need."
)
