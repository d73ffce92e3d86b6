"""What `engine_benchmark` compares: this package's loop, transformers' assisted generation, and flashspec.

Other engines decode one request at a time. flashspec is never a dependency: it is measured where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from spectoolkit.datatypes import Request
from spectoolkit.decode import decode
from spectoolkit.errors import RunError
from spectoolkit.studies.recorded_calls import RecordedModel, Recorder, Spans, recorded_forwards
from spectoolkit.study import Experiment

Outputs = list[tuple[int, ...]]
"""The tokens of each request, in order."""

LOOP, ASSISTED, ASSISTED_DEFAULTS, FLASHSPEC = "spectoolkit", "transformers", "transformers, its defaults", "flashspec"

_FLASHSPEC_VERSION = "0.3."  # whose interface this is written for


class Recording(Protocol):
    """The model calls of a run: the seconds inside forward passes, and of all calls once more alone."""

    @property
    def spans(self) -> Spans: ...

    def repeat(self) -> float: ...


@dataclass(frozen=True)
class Engine:
    """One way to decode the requests of an experiment.

    Attributes:
        name: of the engine.
        requests: what it decodes.
        run: decodes them.
        record: decodes them with its model calls noted: outputs, steps in which the target scored, and the calls.
    """

    name: str
    requests: Sequence[Request]
    run: Callable[[], Outputs]
    record: Callable[[], tuple[Outputs, int, Recording]]


def loop(experiment: Experiment) -> Engine:
    """This package's decoding loop."""
    drafter: Any = experiment.drafter

    def decoded(target: Any, draft_model: Any) -> tuple[Outputs, int]:
        done = decode(
            target,
            replace(drafter, draft_model=draft_model),
            experiment.verifier,
            experiment.requests,
            num_draft_tokens=experiment.num_draft_tokens,
            batch_size=experiment.batch_size,
        )
        by_id = {completion.request.id: completion for completion in done}
        ordered = [by_id[request.id] for request in experiment.requests]
        return [tuple(one.tokens) for one in ordered], sum(len(one.steps) for one in ordered)

    def record() -> tuple[Outputs, int, Recording]:
        recorder = Recorder(Spans(experiment.target.device))
        models = (RecordedModel(model, recorder) for model in (experiment.target, drafter.draft_model))
        outputs, steps = decoded(*models)
        return outputs, steps, recorder

    return Engine(LOOP, experiment.requests, lambda: decoded(experiment.target, drafter.draft_model)[0], record)


def assisted_generation(experiment: Experiment, requests: Sequence[Request], *, fixed_length: bool) -> Engine:
    """`generate` of transformers with an `assistant_model`.

    `fixed_length` drafts K tokens at every step, as the loop does; otherwise transformers' own defaults decide.
    """
    target, draft = _hf_models(experiment)
    options = {"num_assistant_tokens": experiment.num_draft_tokens, "num_assistant_tokens_schedule": "constant"}
    options |= {"assistant_confidence_threshold": 0.0}

    def run() -> Outputs:
        kept = {name: getattr(draft.generation_config, name) for name in options}
        for name in options if fixed_length else ():
            setattr(draft.generation_config, name, options[name])
        try:
            with plain_attention((target, draft)):
                return [generated(request) for request in requests]
        finally:
            for name, value in kept.items():
                setattr(draft.generation_config, name, value)

    def generated(request: Request) -> tuple[int, ...]:
        prompt = torch.tensor([request.prompt], device=target.device)
        sampled = request.params.temperature > 0
        sampling = {"temperature": request.params.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
        with torch.random.fork_rng():
            torch.manual_seed(request.seed)
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=draft,
                do_sample=sampled,
                max_new_tokens=request.max_new_tokens,
                eos_token_id=sorted(request.stop_ids) or None,
                **sampling,
            )
        return tuple(output[0, prompt.shape[1] :].tolist())

    def record() -> tuple[Outputs, int, Recording]:
        with recorded_forwards((target, draft), target.device) as recorder:
            outputs = run()
        return outputs, recorder.count(target), _InPlainAttention(recorder, (target, draft))

    return Engine(ASSISTED if fixed_length else ASSISTED_DEFAULTS, requests, run, record)


def flashspec_missing() -> str | None:
    """Why flashspec cannot be measured; None where it can be."""
    if importlib.util.find_spec("flashspec") is None:
        return "not installed"
    if flashspec_version().startswith(_FLASHSPEC_VERSION):
        return None
    return f"not measured, since version {_FLASHSPEC_VERSION}* was expected, got {flashspec_version()}"


def flashspec_version() -> str:
    """Of the installed package."""
    return str(importlib.import_module("flashspec").__version__)


def flashspec(experiment: Experiment, requests: Sequence[Request]) -> Engine:
    """flashspec's path for one sequence, with a model drafter that always drafts K tokens at the target's temperature.

    Its prompt lookup is left out, since it would draft with something else than the pair; so is its capture of CUDA
    graphs, behind which forward passes cannot be told from the rest.
    """
    package, parts = importlib.import_module("flashspec"), importlib.import_module("flashspec.engine")
    target, draft = _hf_models(experiment)
    temperature = float(requests[0].params.temperature)
    device = experiment.target.device
    options = {"device": device, "dtype": target.dtype}
    engine = package.SpeculativeEngine(
        package.FlashSpecConfig(
            device=str(device),
            compile=False,
            sampling=package.SamplingConfig(gamma=experiment.num_draft_tokens, temperature=temperature),
        ),
        [parts.HuggingFaceDrafter("draft model", temperature=temperature, model=draft, **options)],
        parts.TargetModel("target", model=target, **options),
        arms=[parts.ArmSpec(0, experiment.num_draft_tokens)],
    )

    def decoded() -> tuple[Outputs, int]:
        outputs, steps = [], 0
        with plain_attention((target, draft)):
            for request in requests:
                prompt = torch.tensor([request.prompt], device=device)
                with torch.random.fork_rng():
                    torch.manual_seed(request.seed)
                    result = engine.generate(prompt, request.max_new_tokens, sorted(request.stop_ids))
                outputs.append(tuple(result.output_ids[0, : result.n_tokens_generated].tolist()))
                steps += len(result.arm_steps)
        return outputs, steps

    def record() -> tuple[Outputs, int, Recording]:
        with recorded_forwards((target, draft), device) as recorder:
            outputs, steps = decoded()
        return outputs, steps, _InPlainAttention(recorder, (target, draft))

    return Engine(FLASHSPEC, requests, lambda: decoded()[0], record)


def check_outputs(engine: Engine, outputs: Outputs, vocab_size: int) -> None:
    """Refuse outputs that cannot be: their speed would say nothing.

    Raises:
        RunError: a request without its output, one of the wrong length, or a token that there is not.
    """
    if len(outputs) != len(engine.requests):
        raise RunError(f"{engine.name}: expected {len(engine.requests)} outputs, got {len(outputs)}")
    for request, output in zip(engine.requests, outputs, strict=True):
        is_stopped = bool(output) and output[-1] in request.stop_ids
        if len(output) > request.max_new_tokens or (len(output) < request.max_new_tokens and not is_stopped):
            raise RunError(
                f"{engine.name}: expected {request.max_new_tokens} tokens of request {request.id!r}, or fewer with a "
                f"stop id at their end, got {len(output)}"
            )
        if not all(0 <= token < vocab_size for token in output):
            raise RunError(f"{engine.name}: expected tokens from 0 to {vocab_size - 1}, got {list(output)}")


@contextmanager
def plain_attention(models: Sequence[Any]) -> Iterator[None]:
    """transformers models with its own attention, as other engines expect them; afterwards as they were.

    What transformers says about keywords that those engines use and that it has renamed is not shown, nor about the
    arguments that its own assisted generation hands to `generate`.
    """
    log = logging.getLogger("transformers.generation.utils")
    before = [(model, model.config._attn_implementation) for model in models]
    log.addFilter(_is_about_the_caller)
    try:
        for model, _ in before:
            model.set_attn_implementation("sdpa")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        log.removeFilter(_is_about_the_caller)
        for model, implementation in before:
            model.set_attn_implementation(implementation)


def _is_about_the_caller(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Passing `generation_config` together with")


@dataclass(frozen=True)
class _InPlainAttention:
    """A recording whose calls are repeated with the attention that they were made with."""

    recording: Any
    models: Sequence[Any]

    @property
    def spans(self) -> Spans:
        return self.recording.spans

    def repeat(self) -> float:
        with plain_attention(self.models):
            return self.recording.repeat()


def _hf_models(experiment: Experiment) -> tuple[Any, Any]:
    target: Any = experiment.target
    draft: Any = experiment.drafter.draft_model  # type: ignore[attr-defined]
    return target.hf_model, draft.hf_model
