"""Which settings are fast on a CPU: the target's type, torch's number of threads, and the kind of cache.

Everything is measured in turn within one process, and compared within one repetition; the times themselves depend on
the machine and its other load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch

from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.hf import parse_device
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.runner import completions_of
from spectoolkit.studies.cache_on_cpu import IN_PLACE, NUM_KEPT, CacheCase, cases_of, step_s
from spectoolkit.studies.engine_benchmark import median_and_range, shown_range, spread, undisturbed
from spectoolkit.study import Cell, Experiment, Store

RUNS_IN_ONE_PROCESS = True  # times are compared within one process

AXES = ("target.dtype", "batch_size")

RATES = ("tokens_per_s", "steps_per_s")


@dataclass(frozen=True)
class Setting:
    """A row of the table: the loop with one type, number of threads and batch size."""

    dtype: str
    threads: int
    batch_size: int
    experiment: Experiment


def check(
    cells: Sequence[Cell],
    axes: Sequence[str],
    threads: Sequence[int] | None = None,
    contexts: Sequence[int] = (64, 256),
    **counts: int,
) -> None:
    """Refuse what is not about CPUs, or cannot be compared, before a model is loaded.

    Raises:
        UsageError: other axes, replays, a GPU, a number of threads that this machine does not have, numbers without
            the one that torch uses by itself (all ratios are to it), or a count that is too small.
    """
    if unknown := sorted(set(axes) - set(AXES)):
        raise UsageError(f"grid: expected axes of cpu_settings among {', '.join(AXES)}, got {', '.join(unknown)}")
    if any(cell.engine != "live" for cell in cells):
        raise UsageError(
            "cpu_settings: expected engine=live, since a replay takes no time that says anything of a loop"
        )
    for cell in cells:
        for name in ("target.device", "draft_model.device"):
            said = cell.settings.get(name, "cpu")
            if parse_device(said).type != "cpu":
                raise UsageError(f"{name}: expected cpu, which cpu_settings is about, got {said!r}")
    most, own = num_cores(), torch.get_num_threads()
    if threads is not None and not (threads and min(threads) >= 1 and max(threads) <= most):
        raise UsageError(f"study.threads: expected integers from 1 to {most}, the cores of this machine, got {threads}")
    if threads is not None and own not in threads:
        raise UsageError(
            f"study.threads: expected torch's own number, {own}, among them, since ratios are to it, got {threads}"
        )
    if not contexts or min(contexts) < 2:
        raise UsageError(f"study.contexts: expected integers >= 2, got {contexts}")
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"study.{name}: expected an integer >= 1, got {value}")


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    threads: Sequence[int] | None = None,
    repetitions: int = 3,
    num_requests: int = 4,
    contexts: Sequence[int] = (64, 256),
    cache_steps: int = 4,
) -> str:
    """Measure the loop with every type, number of threads and batch size, and the caches, in turn, `repetitions` times.

    Ratios are to the first of the types with torch's own number of threads, at the same batch size; those of the
    caches to the one that is written in place, with that type, those threads and the largest batch size.

    Args:
        threads: null is 1 and torch's own number.
        num_requests: how many each run decodes; never less than a batch.
        contexts: tokens in the longest row of a cache.
        cache_steps: forward passes over K + 1 tokens per row that are timed together.

    Raises:
        UsageError: a target that is not one of transformers, or a context too long for it.
    """
    default = (str(cells[0].settings.get("target.dtype")), torch.get_num_threads())
    settings = settings_of(cells, sorted(set(threads or (1, default[1]))), num_requests)
    largest = max(setting.batch_size for setting in settings)
    caches = cases_of(model_of(settings[0].experiment), contexts, largest, config["num_draft_tokens"] + 1, cache_steps)
    runs: list[list[dict[str, float]]] = []
    cache_runs: list[list[dict[str, float]]] = []
    with progress_bar((len(settings) + len(caches)) * (1 + repetitions), "run") as bar:
        for turn in range(1 + repetitions):
            found, cache_found = [], []
            with undisturbed():  # once, since collecting takes as long as a short run
                for setting in settings:
                    found.append(measured(setting))
                    bar.update(1)
                for case in caches:
                    cache_found.append({"step_ms": step_s(case, cache_steps) * 1e3})
                    bar.update(1)
            if turn > 0:  # first calls are slow
                runs.append(with_ratios(settings, found, default))
                cache_runs.append(with_cache_ratios(caches, cache_found))
    table = pd.DataFrame(
        {
            "dtype": setting.dtype,
            "threads": setting.threads,
            "batch_size": setting.batch_size,
            "requests": len(setting.experiment.requests),
            **_medians([one[index] for one in runs]),
        }
        for index, setting in enumerate(settings)
    )
    of_caches = pd.DataFrame(
        {**case.settings, "batch_size": largest, **_medians([one[index] for one in cache_runs])}
        for index, case in enumerate(caches)
    )
    notes = provenance()
    text = _markdown(table, of_caches, config, str(notes["device"]), repetitions, default)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "cache.csv", of_caches.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    store.write_manifest({"provenance": notes, "config": config})
    return f"{text}\nTables and manifest are in {store.folder}"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settings_of(cells: Sequence[Cell], threads: Sequence[int], num_requests: int) -> list[Setting]:
    """Every cell with every number of threads, and `num_requests` of its requests, or as many as fill a batch."""
    settings = []
    for cell in cells:
        experiment = cell.build()
        few = spread(experiment.requests, max(num_requests, experiment.batch_size))
        experiment = replace(experiment, requests=few)
        dtype = str(cell.settings.get("target.dtype"))
        settings += [Setting(dtype, number, experiment.batch_size, experiment) for number in threads]
    return settings


def model_of(experiment: Experiment) -> CausalLM:
    """The target without features in its states.

    Raises:
        UsageError: it is not one of transformers.
    """
    target = getattr(experiment.target, "model", experiment.target)  # behind a cache of prefixes
    if not isinstance(target, CausalLM):
        raise UsageError(f"cpu_settings: expected a target of transformers, whose cache is compared, got {target.name}")
    return target.with_features(())


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Have torch use this many threads; afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured(setting: Setting) -> dict[str, float]:
    """One run of the loop."""
    with num_threads(setting.threads):
        begin = time.perf_counter()
        completions = list(completions_of(setting.experiment))
        wall_s = time.perf_counter() - begin
    emitted = sum(len(completion.tokens) for completion in completions)
    steps = sum(len(completion.steps) for completion in completions)
    return {"tokens_per_s": emitted / wall_s, "steps_per_s": steps / wall_s, "acceptance_length": emitted / steps}


def with_ratios(
    settings: Sequence[Setting], found: Sequence[Mapping[str, float]], default: tuple[str, int]
) -> list[dict[str, float]]:
    """One repetition's measurements, with tokens and steps per second over the default's of the same batch size."""
    base = {
        setting.batch_size: one
        for setting, one in zip(settings, found, strict=True)
        if (setting.dtype, setting.threads) == default
    }
    return [
        {**one, **{f"{rate}_over_default": one[rate] / base[setting.batch_size][rate] for rate in RATES}}
        for setting, one in zip(settings, found, strict=True)
    ]


def with_cache_ratios(cases: Sequence[CacheCase], found: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """One repetition's times per step, with those over the time in place of the same rows."""

    def rows(case: CacheCase) -> tuple[object, object]:
        return case.settings["context"], case.settings["lengths"]

    pairs = list(zip(cases, found, strict=True))
    base = {rows(case): one["step_ms"] for case, one in pairs if case.settings["cache"] == IN_PLACE}
    return [{**one, "over_in_place": one["step_ms"] / base[rows(case)]} for case, one in pairs]


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    entry: dict[str, float] = {}
    for name in runs[0]:
        entry |= median_and_range(name, [one[name] for one in runs])
    return entry


def _markdown(
    table: pd.DataFrame,
    caches: pd.DataFrame,
    config: Mapping[str, Any],
    device: str,
    repetitions: int,
    default: tuple[str, int],
) -> str:
    lines = [
        "# Settings on a CPU",
        "",
        f"Medians of {repetitions} repetition{'s' * (repetitions > 1)} on {device}, smallest and largest value in "
        f"brackets; K = {config['num_draft_tokens']}, T = {config['sampling']['temperature']}, "
        f"{config['max_new_tokens']} tokens per request. In every repetition all rows are measured in turn. "
        f"*Default*: {default[0]}, {_counted(default[1])} "
        "(torch's own number), the same batch size, the same repetition. Times depend on the machine and its other "
        "load.",
        "",
        "| target.dtype | threads | batch | requests | tokens/s over the default's | steps/s over the default's | "
        "acceptance length | tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.to_dict("records"):
        lines.append(
            f"| {row['dtype']} | {row['threads']} | {row['batch_size']} | {row['requests']} | "
            f"{shown_range(row, 'tokens_per_s_over_default', 2)} | {shown_range(row, 'steps_per_s_over_default', 2)} | "
            f"{row['acceptance_length']:.2f} | {shown_range(row, 'tokens_per_s', 1)} |"
        )
    lines += [
        "",
        f"One forward pass over {config['num_draft_tokens'] + 1} tokens per row, of which {NUM_KEPT} are kept, on "
        f"batches of {caches['batch_size'].iloc[0]}, {default[0]}, {_counted(default[1])}:",
        "",
        "| tokens of context | lengths | cache | time over that in place | ms per pass |",
        "|---:|---|---|---:|---:|",
    ]
    for row in caches.to_dict("records"):
        lines.append(
            f"| {row['context']} | {row['lengths']} | {row['cache']} | {shown_range(row, 'over_in_place', 2)} | "
            f"{shown_range(row, 'step_ms', 1)} |"
        )
    return "\n".join([*lines, "", _EXPLANATION]) + "\n"


def _counted(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


_EXPLANATION = """\
*tokens/s*: of whole runs of the loop, prefills included. *steps/s*: steps of single requests in which the target
scores drafts; its ratio leaves out that other roundings give other tokens, of which other numbers are accepted.

*in place*: this package's cache, whose buffers are written and read where they are. *DynamicCache*: the one of
transformers, which concatenates all keys and values in every layer of every pass, from the same keys and values on.
*Same attention*: the cache alone makes the difference; *attention of transformers*: its `sdpa`, which is what a
`DynamicCache` usually comes with. Where lengths go *from half to all* of the context, a `DynamicCache` holds rows
padded on the left and a mask, since it has one length for all rows; it then has to have transformers' attention. All
rows keep equally many tokens of a pass here: where they keep different numbers, as they do in decoding, a
`DynamicCache` would have to be padded anew after every step, which is not timed. Neither is growth of the buffers in
place, which double when they are full."""
