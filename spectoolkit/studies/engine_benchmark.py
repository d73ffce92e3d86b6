"""How close the decoding loop comes to its forwards, and how it compares with transformers' assisted generation.

Every ratio is taken within one run on one machine; the seconds in the table are only there to show what it was made of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch

from spectoolkit.datatypes import Request
from spectoolkit.decode import decode
from spectoolkit.errors import UsageError
from spectoolkit.files import replace_text
from spectoolkit.interfaces import LanguageModel
from spectoolkit.progress import progress_bar
from spectoolkit.provenance import provenance
from spectoolkit.study import Cell, Experiment, Store

RUNS_IN_ONE_PROCESS = True  # times are compared within one process

FORWARDS = ("prefill", "score")


@dataclass
class Recorder:
    """Notes every call to the models of a run, with the time it took, so that the calls can be made once more alone.

    Attributes:
        calls: (model, method, arguments); states are replaced by their number, in the order in which they appeared.
        seconds: per method.
    """

    calls: list[tuple[LanguageModel, str, tuple[Any, ...]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def repeat(self) -> float:
        """Make the same calls in the same order, nothing between them; returns the seconds they take: the floor."""
        states: list[Any] = []
        begin = _now(self.calls[0][0].device)
        with torch.inference_mode():
            for model, method, arguments in self.calls:
                given = [states[a.number] if isinstance(a, _State) else a for a in arguments]
                result = getattr(model, method)(*given)
                states.append(result[1] if method == "score" else result)
                for argument in arguments:
                    if isinstance(argument, _State):
                        states[argument.number] = None  # consumed, as in the run itself
        return _now(self.calls[0][0].device) - begin


@dataclass(frozen=True)
class _State:
    number: int
    value: Any


class RecordedModel:
    """A language model whose calls go through a `Recorder`."""

    def __init__(self, model: LanguageModel, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self.name, self.vocab_size, self.context_length = model.name, model.vocab_size, model.context_length
        self.device, self.tokenizer = model.device, model.tokenizer

    def prefill(self, prefixes: Sequence[Sequence[int]]) -> _State:
        return self._call("prefill", prefixes)

    def score(self, state: _State, tokens: torch.Tensor) -> tuple[torch.Tensor, _State]:
        return self._call("score", state, tokens)

    def rollback(self, state: _State, lengths: torch.Tensor) -> _State:
        return self._call("rollback", state, lengths)

    def select(self, state: _State, rows: Sequence[int]) -> _State:
        return self._call("select", state, rows)

    def insert(self, state: _State, rows: Sequence[int], other: _State) -> _State:
        return self._call("insert", state, rows, other)

    def _call(self, method: str, *arguments: Any) -> Any:
        given = [a.value if isinstance(a, _State) else a for a in arguments]
        begin = _now(self._model.device)
        result = getattr(self._model, method)(*given)
        spent = _now(self._model.device) - begin
        self._recorder.seconds[method] = self._recorder.seconds.get(method, 0.0) + spent
        numbered = tuple(_State(a.number, None) if isinstance(a, _State) else a for a in arguments)
        self._recorder.calls.append((self._model, method, numbered))
        number = len(self._recorder.calls) - 1
        return (result[0], _State(number, result[1])) if method == "score" else _State(number, result)


def run(
    cells: Sequence[Cell],
    store: Store,
    *,
    axes: Sequence[str],
    config: Mapping[str, Any],
    repetitions: int = 3,
) -> str:
    """Measure every cell `repetitions` times, and assisted generation on the same requests beside it; medians count.

    Raises:
        UsageError: a cell without a draft model, or whose models are not those of transformers.
    """
    rows: list[dict[str, Any]] = []
    with progress_bar(len(cells) * repetitions, "run") as bar:
        for cell in cells:
            experiment = cell.build()
            check_models(experiment)
            _assisted(experiment, experiment.requests[:1], fixed_length=True)  # first calls are slow
            _loop(replace(experiment, requests=experiment.requests[:1]))
            runs: list[dict[str, float]] = []
            for _ in range(repetitions):
                measured = _loop(experiment)
                for name, fixed_length in (("assisted", True), ("assisted_default", False)):
                    tokens_per_s = _assisted(experiment, experiment.requests, fixed_length=fixed_length)
                    measured[f"over_{name}"] = measured["tokens_per_s"] / tokens_per_s
                runs.append(measured)
                bar.update(1)
            medians = {name: statistics.median(one[name] for one in runs) for name in runs[0]}
            settings = {"drafter": cell.settings["drafter.name"], "verifier": cell.settings["verifier.name"]}
            rows.append({**settings, "batch_size": experiment.batch_size, **medians})
    table = pd.DataFrame(rows)
    notes = provenance()
    text = _markdown(table, config, str(notes["device"]), repetitions)
    replace_text(store.folder / "table.csv", table.to_csv(index=False, lineterminator="\n"))
    replace_text(store.folder / "table.md", text)
    store.write_manifest({"provenance": notes, "config": config})
    return f"{text}\nTable and manifest are in {store.folder}"


def check_models(experiment: Experiment) -> None:
    """Refuse what assisted generation cannot do.

    Raises:
        UsageError: no draft model, or models that are not those of transformers.
    """
    models = (experiment.target, getattr(experiment.drafter, "draft_model", None))
    if not all(hasattr(model, "hf_model") for model in models):
        raise UsageError(
            "engine_benchmark: expected a target and a draft model of transformers (to compare with its assisted "
            f"generation), got {[getattr(model, 'name', None) for model in models]}"
        )


def _loop(experiment: Experiment) -> dict[str, float]:
    """One run of the loop with its calls recorded, then the same calls alone."""
    recorder = Recorder()
    draft_model = RecordedModel(experiment.drafter.draft_model, recorder)  # type: ignore[attr-defined]
    begin = _now(experiment.target.device)
    completions = list(
        decode(
            RecordedModel(experiment.target, recorder),
            replace(experiment.drafter, draft_model=draft_model),  # type: ignore[type-var]
            experiment.verifier,
            experiment.requests,
            num_draft_tokens=experiment.num_draft_tokens,
            batch_size=experiment.batch_size,
        )
    )
    wall_s = _now(experiment.target.device) - begin
    emitted = sum(len(completion.tokens) for completion in completions)
    steps = sum(len(completion.steps) for completion in completions)
    return {
        "tokens_per_s": emitted / wall_s,
        "acceptance_length": emitted / steps,
        "forward_share": sum(recorder.seconds[name] for name in FORWARDS) / wall_s,
        "over_floor": wall_s / recorder.repeat(),
    }


def _assisted(experiment: Experiment, requests: Sequence[Request], *, fixed_length: bool) -> float:
    """Tokens per second of transformers' assisted generation, which decodes one request at a time.

    `fixed_length` drafts K tokens at every step, as the loop does; otherwise transformers' own defaults decide.
    """
    target: Any = experiment.target
    draft: Any = experiment.drafter.draft_model  # type: ignore[attr-defined]
    options = {"num_assistant_tokens": experiment.num_draft_tokens, "num_assistant_tokens_schedule": "constant"}
    options |= {"assistant_confidence_threshold": 0.0}
    attention = {model: model.config._attn_implementation for model in (target.hf_model, draft.hf_model)}
    for model in attention:
        model.set_attn_implementation("sdpa")
    kept = {name: getattr(draft.hf_model.generation_config, name) for name in options}
    for name in options if fixed_length else ():
        setattr(draft.hf_model.generation_config, name, options[name])
    begin, emitted = _now(target.device), 0
    try:
        for request in requests:
            prompt = torch.tensor([request.prompt], device=target.device)
            sampled = request.params.temperature > 0
            sampling = {"temperature": request.params.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
            with torch.random.fork_rng():
                torch.manual_seed(request.seed)
                output = target.hf_model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    assistant_model=draft.hf_model,
                    do_sample=sampled,
                    max_new_tokens=request.max_new_tokens,
                    eos_token_id=sorted(request.stop_ids) or None,
                    **sampling,
                )
            emitted += output.shape[1] - prompt.shape[1]
    finally:
        for name, value in kept.items():
            setattr(draft.hf_model.generation_config, name, value)
        for model, implementation in attention.items():
            model.set_attn_implementation(implementation)
    return emitted / (_now(target.device) - begin)


def _markdown(table: pd.DataFrame, config: Mapping[str, Any], device: str, repetitions: int) -> str:
    lines = [
        "# Engine benchmark",
        "",
        f"Medians of {repetitions} runs on {device}; K = {config['num_draft_tokens']}, T = "
        f"{config['sampling']['temperature']}, {config['max_new_tokens']} tokens per request. Ratios compare within "
        "one run; seconds depend on the machine and its other load.",
        "",
        "| drafter | verifier | batch | forward share | time over floor | tokens/s over assisted generation, K fixed | "
        "over its defaults | acceptance length | tokens/s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.to_dict("records"):
        lines.append(
            f"| {row['drafter']} | {row['verifier']} | {row['batch_size']} | {row['forward_share']:.1%} | "
            f"{row['over_floor']:.3f} | {row['over_assisted']:.2f} | {row['over_assisted_default']:.2f} | "
            f"{row['acceptance_length']:.2f} | {row['tokens_per_s']:.1f} |"
        )
    return "\n".join([*lines, "", _EXPLANATION]) + "\n"


_EXPLANATION = (
    "*forward share*: time inside `prefill` and `score` of both models over the loop's wall time. *time over floor*: "
    "the wall time over that of the very same model calls (forwards, rollbacks, joins) with nothing between them. "
    "*assisted generation*: `transformers` generate with `assistant_model`, one request at a time, the same pair, "
    "prompts and sampling parameters; once with K tokens drafted at every step, once with its defaults."
)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
