"""Draft models made of the target's own weights: some of its layers, or all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from spectoolkit.errors import UsageError
from spectoolkit.models.causal_lm import CausalLM, decoder_layers

Model = TypeVar("Model")


def self_draft(target: Model) -> Model:
    """The target as its own draft model; states are values, so the two uses do not meet."""
    return target


def skip_layers(target: CausalLM, skipped_layers: Sequence[int], chosen_for: str | None = None) -> CausalLM:
    """The target without some of its decoder layers, as a model of its own that shares every weight with it.

    Self-speculative decoding (Zhang et al., arXiv 2309.08168) skips attention and MLP sublayers separately; here whole
    layers are left out, so that their keys and values need not be cached either.

    Args:
        skipped_layers: layer numbers, counted from 0, without repetition; at least one layer must be left.
        chosen_for: name of the target whose layers these are, so that they are not taken for another one's; None if
            that is the caller's business.

    Raises:
        UsageError: numbers that are not such, another target, or one that is not a transformers model.
    """
    if chosen_for not in (None, target.name):
        raise UsageError(
            f"draft_model: expected the target {chosen_for}, for which these layers were chosen, got {target.name}; "
            "choose a draft model with draft_model=hf draft_model.model=..., or find layers for this target with "
            "experiment=layer_skip_search and give them with draft_model=layer_skip draft_model.skipped_layers=[...]"
        )
    if not isinstance(target, CausalLM):
        raise UsageError(f"draft_model: expected a transformers target to skip layers of, got {type(target).__name__}")
    num_layers = len(decoder_layers(target.hf_model))
    skipped = list(skipped_layers)
    if not all(type(layer) is int and 0 <= layer < num_layers for layer in skipped):
        raise UsageError(f"skipped_layers: expected numbers from 0 to {num_layers - 1}, got {skipped}")
    if len(set(skipped)) < len(skipped):
        raise UsageError(f"skipped_layers: expected each layer at most once, got {skipped}")
    if len(skipped) == num_layers:
        raise UsageError(f"skipped_layers: expected fewer than all {num_layers} layers, got {skipped}")
    kept = [layer for layer in range(num_layers) if layer not in skipped]
    name = f"{target.name} without layers {sorted(skipped)}" if skipped else target.name
    return CausalLM(keep_layers(target.hf_model, kept), target.tokenizer, name, graphs=target.graphs.switch)


def keep_layers(hf_model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A copy of `hf_model` with only the layers `kept`, renumbered; no parameter and no buffer is copied.

    The structure is copied and the tensors are not: this carries over what a state dict does not hold (rotary
    frequencies, tied weights) and what a layer's number decided when it was built (its type of attention).
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*hf_model.parameters(), *hf_model.buffers())}
    for index, layer in enumerate(decoder_layers(hf_model)):
        if index not in kept:
            # What the memo holds is taken for the copy, so that nothing of a dropped layer is reachable from it.
            memo[id(layer)] = nn.Identity()
    smaller = copy.deepcopy(hf_model, memo)
    layers = decoder_layers(smaller)
    remaining = [layers[index] for index in kept]
    for index, layer in enumerate(remaining):
        for module in layer.modules():
            # The place in the cache; everything else that depends on the number was settled in the constructor.
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = index  # pyright: ignore[reportArgumentType]
    num_layers = len(layers)
    del layers[:]
    layers.extend(remaining)
    config = smaller.config.get_text_config()
    for key, value in vars(config).items():
        # layer_types and its like; some models read them while they run.
        if "layer" in key and isinstance(value, (list, tuple)) and len(value) == num_layers:
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    return smaller


def layer_skip_search(
    target: CausalLM,
    sequences: Sequence[Sequence[int]],
    counted: Sequence[Sequence[bool]],
    temperature: float,
    max_skipped: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """Which layers to leave out: greedily the one whose removal keeps the mean overlap sum_x min(p(x), q(x)) highest.

    p and q are the laws softmax(logits / T) of the whole target and of the rest, teacher-forced on `sequences`. The
    overlap is the probability that rejection sampling accepts a draft token (Leviathan et al., arXiv 2211.17192,
    theorem 3.5). Among layers that are equally good the lowest number wins.

    Args:
        sequences: token ids, best sampled from the target at the temperature of use.
        counted: of each token whether the law it was drawn from counts, False for prompts; there is no law for token 0.
        temperature: T > 0.
        max_skipped: layers to leave out at most, below their number.
        progress: called with (candidates done, candidates in all).

    Returns:
        For 1, 2, .., `max_skipped` layers: the layers in the order in which they went, and the overlap.

    Raises:
        UsageError: an argument outside its range, or no token that counts.
    """
    num_layers = len(decoder_layers(target.hf_model))
    if not temperature > 0:
        raise UsageError(f"temperature: expected a number > 0, got {temperature!r}")
    if not 1 <= max_skipped < num_layers:
        raise UsageError(f"max_skipped: expected a number from 1 to {num_layers - 1}, got {max_skipped!r}")
    if [len(tokens) for tokens in sequences] != [len(flags) for flags in counted]:
        raise UsageError("counted: expected one flag per token of each sequence")
    if any(flags[0] for flags in counted if flags) or not any(map(any, counted)):
        raise UsageError("counted: expected some tokens to count, and never the first of a sequence")
    return _Search(target, sequences, counted, temperature).run(max_skipped, progress)


@dataclass(slots=True)
class _Trace:
    """One sequence on its way through the layers.

    Attributes:
        tokens: [1, n] ids.
        rows: positions whose next-token law counts.
        calls: per layer of the target, the arguments (hidden state aside) of its call.
        inputs: per layer of the target, the hidden state [1, n, D] that enters it, or would if it was still there.
        target_logits: [len(rows), V], in the model's dtype.
    """

    tokens: Tensor
    rows: Tensor
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    inputs: list[Tensor]
    target_logits: Tensor


class _Injected(nn.Module):
    """Stands for all decoder layers and outputs what it was given."""

    hidden: Tensor

    def __init__(self, is_tuple: bool) -> None:
        super().__init__()
        self.is_tuple = is_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.hidden,) if self.is_tuple else self.hidden


class _Search:
    """The greedy search. Removing a layer changes nothing before it, so a candidate is run from its layer on."""

    # Rows of logits that are turned into probabilities at a time.
    _ROWS = 128

    def __init__(
        self,
        target: CausalLM,
        sequences: Sequence[Sequence[int]],
        counted: Sequence[Sequence[bool]],
        temperature: float,
    ) -> None:
        self.temperature = temperature
        self.layers = list(decoder_layers(target.hf_model))
        self.is_tuple = False
        self.traces = [
            self._trace(target, tokens, flags) for tokens, flags in zip(sequences, counted, strict=True) if any(flags)
        ]
        # Embedding, final norm and head of the model, with a gap for the layers.
        self.shell = keep_layers(target.hf_model, [len(self.layers) - 1])
        self.injected = _Injected(self.is_tuple)
        decoder_layers(self.shell)[0] = self.injected

    @torch.no_grad()
    def run(self, max_skipped: int, progress: Callable[[int, int], None] | None) -> list[tuple[tuple[int, ...], float]]:
        num_candidates = sum(len(self.layers) - done for done in range(max_skipped))
        num_done = 0
        skipped: list[int] = []
        found: list[tuple[tuple[int, ...], float]] = []
        for _ in range(max_skipped):
            best, best_overlap = -1, -1.0
            for layer in range(len(self.layers)):
                if layer in skipped:
                    continue
                overlap = self._overlap([*skipped, layer], layer)
                if overlap > best_overlap:
                    best, best_overlap = layer, overlap
                num_done += 1
                if progress is not None:
                    progress(num_done, num_candidates)
            skipped.append(best)
            found.append((tuple(skipped), best_overlap))
            for trace in self.traces:
                self._forward(trace, skipped, best, keep_inputs=True)
        return found

    @torch.no_grad()
    def _trace(self, target: CausalLM, tokens: Sequence[int], flags: Sequence[bool]) -> _Trace:
        """Run the whole target, noting what enters each layer."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        inputs: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if args:
                inputs.append(args[0])
                calls.append((args[1:], kwargs))
            else:
                inputs.append(kwargs["hidden_states"])
                calls.append(((), {key: value for key, value in kwargs.items() if key != "hidden_states"}))

        def note_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.is_tuple = isinstance(output, tuple)

        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self.layers]
        handles.append(self.layers[-1].register_forward_hook(note_output))
        device = target.device
        ids = torch.as_tensor(list(tokens), dtype=torch.long, device=device)[None]
        rows = torch.tensor([place - 1 for place, flag in enumerate(flags) if flag], device=device)
        try:
            logits = target.hf_model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return _Trace(ids, rows, calls, inputs, logits)

    def _forward(self, trace: _Trace, skipped: Sequence[int], start: int, keep_inputs: bool = False) -> Tensor:
        """Hidden state [1, n, D] behind all layers but `skipped`, from what enters layer `start`."""
        hidden = trace.inputs[start]
        for index in range(start, len(self.layers)):
            if keep_inputs:
                trace.inputs[index] = hidden
            if index not in skipped:
                args, kwargs = trace.calls[index]
                output = self.layers[index](hidden, *args, **kwargs)
                hidden = output[0] if self.is_tuple else output
        return hidden

    def _overlap(self, skipped: Sequence[int], start: int) -> float:
        """Mean of sum_x min(p(x), q(x)) over all rows that count."""
        total, num_rows = 0.0, 0
        for trace in self.traces:
            self.injected.hidden = self._forward(trace, skipped, start)
            for first in range(0, len(trace.rows), self._ROWS):
                rows = trace.rows[first : first + self._ROWS]
                logits = self.shell(input_ids=trace.tokens, use_cache=False, logits_to_keep=rows).logits[0]
                target_probs = self._probs(trace.target_logits[first : first + self._ROWS])
                total += torch.minimum(target_probs, self._probs(logits)).sum().item()
            num_rows += len(trace.rows)
        return total / num_rows

    def _probs(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature, dim=-1)
