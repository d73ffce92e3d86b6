"""Train a draft head for the target, on text sampled from the target, and measure it on prompts of another set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from spectoolkit import metrics
from spectoolkit.drafters import ModelDrafter
from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.eagle3_files import save_eagle3
from spectoolkit.models.eagle3_head import Eagle3Head
from spectoolkit.models.eagle3_start import fresh_head, head_config, trained_head, with_draft_ids
from spectoolkit.models.prefix_cache import PrefixCache
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.records import expected_rows
from spectoolkit.replay import Strategy, replay
from spectoolkit.report import plots
from spectoolkit.report.training import Card, training_figure
from spectoolkit.runner import outputs_of
from spectoolkit.study import Cell, Experiment, Store
from spectoolkit.training.data import Batch, Example, HiddenCache, batches, frequent_ids
from spectoolkit.training.evaluate import held_out, means
from spectoolkit.training.loop import Schedule, train
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Rejection

RUNS_IN_ONE_PROCESS = True  # one training, which keeps checkpoints of its own

SHARED_RUN = 12
"""No held-out prompt may share this many consecutive tokens with training text (what all prompts begin with aside)."""

_HELD_OUT_BATCH = 16


def check(cells: Sequence[Cell], axes: Sequence[str], *, held_out_prompts: str, **parameters: Any) -> None:
    """Refuse cells that leave nothing to train on or to measure on.

    Raises:
        UsageError: no cell, or all of them, with the held-out prompts; several held-out ones; or T = 0 there.
    """
    held = [cell for cell in cells if cell.settings["prompts.name"] == held_out_prompts]
    if len(held) != 1 or len(held) == len(cells):
        raise UsageError(
            f"study.held_out_prompts: expected one cell with prompts={held_out_prompts} and others to train on, got "
            f"{len(held)} of {len(cells)}"
        )
    if held[0].settings["sampling.temperature"] == 0:
        raise UsageError("sampling.temperature: expected a number > 0 for the held-out prompts, got 0")


@dataclass(frozen=True)
class _Text:
    """Outputs of one cell."""

    cell: Cell
    experiment: Experiment
    examples: list[Example]
    outputs: Trajectories


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    held_out_prompts: str,
    start: str | None,
    draft_vocab_size: int,
    examples_per_step: int,
    num_steps: int,
    num_warmup: int,
    learning_rate: float,
    num_depths: int,
    depth_decay: float,
    temperatures: Sequence[float],
    acceptance_weight: float,
    acceptance_from: float,
    trains_output: bool,
    checkpoint_every: int,
    num_quick: int,
    feature_cache_gb: float,
    feature_layers: Sequence[int] | None = None,
    written_vocab_size: int | None = None,
) -> str:
    """Sample what is missing of the text, train or go on training, measure, and write the head into `head/`.

    `head_without_output/` is the same without the output rows where these are the target's: smaller, for this package.

    Args:
        held_out_prompts: option of the group `prompts` whose cell is measured on; all other cells are trained on.
        start: folder or hub repository of a head to go on training; null begins with the target's last layer.
        draft_vocab_size: ids that the head can propose: the most frequent ones of the text.
        examples_per_step: outputs in a batch.
        num_steps, num_warmup, learning_rate, num_depths, depth_decay, temperatures, acceptance_weight,
            acceptance_from, trains_output, checkpoint_every: see `training.loop.Schedule`.
        num_quick: held-out outputs that the curves are measured on; the table takes all of them.
        feature_cache_gb: disk space for the target's hidden states; what does not fit is computed again and again.
        feature_layers: the target's layers to read; null is low, middle and high as in published heads.
        written_vocab_size: ids that the written head proposes; null is those it was trained with. Others are possible
            where the output layer was not trained (`models.eagle3_start.with_draft_ids`).

    Raises:
        UsageError: a target that is not one of transformers, training prompts that share a passage with held-out ones,
            a head to start from that does not fit, or settings outside their range.
    """
    schedule = Schedule(
        num_steps=num_steps,
        num_warmup=num_warmup,
        learning_rate=learning_rate,
        num_depths=num_depths,
        depth_decay=depth_decay,
        temperatures=tuple(float(temperature) for temperature in temperatures),
        acceptance_weight=acceptance_weight,
        acceptance_from=acceptance_from,
        trains_output=trains_output,
        checkpoint_every=checkpoint_every,
        seed=config["seed"],
    )
    if examples_per_step < 1 or num_quick < 1 or feature_cache_gb < 0:
        raise UsageError("study: expected examples_per_step and num_quick >= 1 and feature_cache_gb >= 0")
    built = cells[0].build().target
    target = built.model if isinstance(built, PrefixCache) else built
    if not isinstance(target, CausalLM):
        raise UsageError(f"train_draft_head: expected a target of transformers, got {target.name}")
    if written_vocab_size is not None and (trains_output or not 1 <= written_vocab_size <= target.vocab_size):
        raise UsageError(
            f"study.written_vocab_size: expected null, or a number from 1 to {target.vocab_size} with "
            f"trains_output=false, got {written_vocab_size} with trains_output={trains_output}"
        )
    shape = head_config(target, draft_vocab_size, None if feature_layers is None else tuple(feature_layers))
    if start is not None:
        begun = trained_head(target, start, torch.arange(draft_vocab_size))  # refuses before anything is sampled
        if feature_layers is not None and tuple(feature_layers) != begun.config.feature_layers:
            raise UsageError(
                f"study.feature_layers: expected null or the layers {list(begun.config.feature_layers)} that "
                f"{start!r} reads, got {list(feature_layers)}"
            )
        shape = begun.config
    target = target.with_features(shape.feature_layers)
    texts = [_text(cell, store) for cell in cells]
    held = next(text for text in texts if text.cell.settings["prompts.name"] == held_out_prompts)
    trained = [text for text in texts if text is not held]
    examples, num_left_out = apart(
        [example for text in trained for example in text.examples], [example.prompt for example in held.examples]
    )
    draft_ids = frequent_ids(examples, draft_vocab_size, target.vocab_size)
    if start is None:
        head = fresh_head(target, shape, draft_ids, config["seed"])
    else:
        head = trained_head(target, start, draft_ids)
    draft = Eagle3(head, target, "head in training")
    quick = _held_out_batches(held.examples[:: max(1, len(held.examples) // num_quick)][:num_quick])
    temperature = float(held.cell.settings["sampling.temperature"])

    def evaluate() -> dict[str, float]:
        frame = held_out(draft, target, quick, temperature, num_depths)
        sums: Any = frame.groupby("depth")[["overlap", "tokens"]].sum()
        means_by_depth = sums["overlap"] / sums["tokens"]
        return {f"overlap_{depth}": round(float(mean), 4) for depth, mean in means_by_depth.items()}

    fed = batches(examples, examples_per_step, config["seed"])
    hidden = HiddenCache(target, store.folder / "features" / _key(cells[0], target), int(feature_cache_gb * 1e9))
    identity = {
        "text": [text.cell.text_identity for text in trained],
        "draft_vocab_size": draft_vocab_size,
        "feature_layers": list(shape.feature_layers),
        "examples_per_step": examples_per_step,
        "start": None if start is None else _weights(head),
    }
    identity = json.loads(json.dumps(identity, default=str))
    log = train(draft, target, fed, hidden, schedule, store.folder / "checkpoint.pt", identity, evaluate)
    frame = pd.DataFrame(log)
    replace_text(store.folder / "log.csv", frame.to_csv(index=False, lineterminator="\n"))
    plots.save(training_figure(frame, temperature), store.folder)
    hf_model = target.hf_model
    draft.head.eval()
    if written_vocab_size is not None:
        written_ids = frequent_ids(examples, written_vocab_size, target.vocab_size)
        draft = Eagle3(with_draft_ids(draft.head, target, written_ids), target, draft.name)
    written = (target.name, type(hf_model).__name__, num_depths, torch.float16)
    save_eagle3(draft.head, store.folder / "head", *written)
    if not trains_output:
        save_eagle3(draft.head, store.folder / "head_without_output", *written, with_output=False)
    draft.head.to(hf_model.dtype)
    facts = {
        "Text": _text_fact(trained) + f"; {num_left_out} outputs left out that share {SHARED_RUN} consecutive tokens "
        "with a held-out prompt",
        "Start": "the target's last layer" if start is None else f"the head {Path(start).name} ({identity['start']})",
        "Training": f"{num_steps:,} steps of {examples_per_step} outputs, laws at T = "
        f"{', '.join(f'{t:g}' for t in schedule.temperatures)} in turn",
    }
    card = _measure(draft, target, facts, held, config)
    replace_text(store.folder / "held_out.csv", card.by_depth.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", card.markdown())
    for folder in store.folder.glob("head*"):
        replace_text(folder / "README.md", card.markdown())
    store.write_manifest({"provenance": provenance(), "config": config, "facts": card.facts})
    return f"{card.markdown()}\nThe head is in {store.folder / 'head'}, its curves are in {store.folder}"


def apart(trained: Sequence[Example], held: Sequence[Sequence[int]]) -> tuple[list[Example], int]:
    """The examples whose text shares no `SHARED_RUN` consecutive tokens with a prompt of `held`, and how many do.

    What all prompts begin with (system prompt, markers of roles) is left out. A sampled output may come upon a passage
    of a held-out prompt, and is dropped then; a prompt that does so is a mistake.

    Raises:
        UsageError: a training prompt shares a passage with one of `held`, or is one of them.
    """
    common = _common_length([*(example.prompt for example in trained), *held])

    def runs(tokens: Sequence[int]) -> set[tuple[int, ...]]:
        rest = tuple(tokens[common:])
        return {rest[i : i + SHARED_RUN] for i in range(len(rest) - SHARED_RUN + 1)} or {rest} - {()}

    of_held = set().union(*(runs(prompt) for prompt in held))
    num_shared = sum(bool(runs(prompt) & of_held) for prompt in {example.prompt for example in trained})
    if num_shared:
        raise UsageError(
            f"prompts: expected training prompts apart from the held-out ones, got {num_shared} that share "
            f"{SHARED_RUN} consecutive tokens with one of these"
        )
    kept = [example for example in trained if not runs((*example.prompt, *example.output)) & of_held]
    return kept, len(trained) - len(kept)


def _common_length(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that all begin with."""
    ordered = [tuple(sequence) for sequence in sequences]
    first, last = min(ordered), max(ordered)  # in lexicographic order: what these share, all share
    return next((i for i, token in enumerate(first) if token != last[i]), len(first))


def _weights(head: Eagle3Head) -> str:
    """A hash of what a head holds."""
    digest = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _text(cell: Cell, store: Store) -> _Text:
    experiment = cell.build()
    with progress_bar(cell.num_requests, "request") as bar:
        bar.set_description(f"text at T = {cell.settings['sampling.temperature']}")
        outputs, _ = outputs_of(cell, experiment, store, bar)
    pairs = zip(outputs.requests, outputs.outputs, strict=True)
    examples = [Example(request.prompt, output) for request, output in pairs if len(request.prompt) > 1]
    return _Text(cell, experiment, examples, outputs)


def _held_out_batches(examples: Sequence[Example]) -> list[Batch]:
    """In the order of the examples, so that rows can be told apart later."""
    return [Batch.of(examples[i : i + _HELD_OUT_BATCH]) for i in range(0, len(examples), _HELD_OUT_BATCH)]


def _key(cell: Cell, target: CausalLM) -> str:
    """A hash of what hidden states depend on besides the text: the target, its files included, and the layers."""
    named = {key: value for key, value in cell.text_identity.items() if key.startswith("target.")}
    named |= {"dtype": str(target.hf_model.dtype), "layers": list(target.feature_layers)}
    return hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _measure(
    draft: Eagle3, target: CausalLM, training: Mapping[str, str], held: _Text, config: Mapping[str, Any]
) -> Card:
    """The finished head on all held-out text; `training` are the facts of how it was trained."""
    k, temperature = int(config["num_draft_tokens"]), float(held.cell.settings["sampling.temperature"])
    clusters = [held.experiment.clusters[r.id] for r in held.outputs.requests if len(r.prompt) > 1]
    by_example = held_out(draft, target, _held_out_batches(held.examples), temperature, k)
    lengths, paired = _acceptance_lengths(draft, target, held, k)
    num_held = len({example.prompt for example in held.examples})
    sizes = {name: p.numel() for name, p in draft.head.named_parameters()}
    return Card(
        facts={
            "Target": target.name,
            **training,
            "Size": f"{sum(sizes.values()):,} parameters, {sizes['lm_head.weight']:,} of them in the output layer",
            "Draft ids": f"{len(draft.head.d2t):,}, which cover {_coverage(draft, held):.2%} of the held-out tokens",
            "Features": f"inputs of the target's layers {list(draft.feature_layers)}",
            "Held out": f"{num_held} prompts ({held.cell.settings['prompts.name']}), of which none shares {SHARED_RUN} "
            "consecutive tokens with the training text (what all prompts begin with left out)",
        },
        by_depth=means(by_example, clusters),
        temperature=temperature,
        num_draft_tokens=k,
        lengths=lengths,
        difference=(paired.estimate, paired.low, paired.high),
        command=str(provenance()["command"]),
    )


def _text_fact(trained: Sequence[_Text]) -> str:
    """How much text of which prompts at which temperatures."""
    by_source: dict[str, list[_Text]] = {}
    for text in trained:
        by_source.setdefault(str(text.cell.settings["prompts.name"]), []).append(text)
    parts = []
    for source, texts in by_source.items():
        outputs = [example.output for text in texts for example in text.examples]
        temperatures = sorted({float(text.cell.settings["sampling.temperature"]) for text in texts})
        parts.append(
            f"{sum(map(len, outputs)):,} tokens in {len(outputs):,} outputs of the target ({source}, T = "
            f"{', '.join(f'{t:g}' for t in temperatures)})"
        )
    return "; ".join(parts)


def _coverage(draft: Eagle3, held: _Text) -> float:
    tokens = torch.tensor([token for example in held.examples for token in example.output])
    return draft.head.t2d.cpu()[tokens].double().mean().item()


def _acceptance_lengths(
    draft: Eagle3, target: CausalLM, held: _Text, k: int
) -> tuple[dict[str, tuple[float, float, float]], metrics.Difference]:
    """Acceptance length of both ways to draft, and their difference paired by prompt."""
    drafters = {
        "argmax": ModelDrafter(draft, target.vocab_size, constant=0.0),
        "same temperature": ModelDrafter(draft, target.vocab_size, ratio=1.0),
    }
    strategies = [Strategy(drafter, Rejection(), k) for drafter in drafters.values()]
    counts = replay(target, strategies, held.outputs)
    requests = held.outputs.requests
    rows = [
        expected_rows(
            of_strategy[k - 1],
            held.outputs,
            clusters=[held.experiment.clusters[request.id] for request in requests],
            categories=[held.experiment.categories[request.id] for request in requests],
            draft_bytes_per_token=0,
        )
        for of_strategy in counts
    ]
    found = {}
    for name, frame in zip(drafters, rows, strict=True):
        low, high = metrics.bootstrap(frame, ["acceptance_length"])["acceptance_length"]
        found[name] = (metrics.summarise(frame)["acceptance_length"], low, high)
    return found, metrics.paired_difference(rows[0], rows[1], "acceptance_length")
