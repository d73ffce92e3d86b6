"""Causal language models of transformers on a ragged cache, and the architectures for which there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from spectoolkit.errors import ContractError, UsageError
from spectoolkit.interfaces import Part, Tokenizer
from spectoolkit.models.cache_view import CacheView
from spectoolkit.models.cuda_graphs import Graphs
from spectoolkit.models.ragged_cache import ATTENTION, RaggedCache

SUPPORTED = (
    "decoder-only models whose layers all have full or sliding-window attention, among them Llama, SmolLM2, SmolLM3, "
    "Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3, Phi, Phi-3, OLMo 2, GPT-2, GPT-NeoX and OPT"
)

# One forward pass of a prefill holds at most this many tokens, padding included ...
_PREFILL_TOKENS = 8192
# ... and no row that is shorter than this share of its longest one.
_PREFILL_FILL = 0.75


class CausalLM:
    """A transformers causal language model with a ragged cache: `interfaces.LanguageModel`.

    Attributes:
        name: what the user calls it.
        hf_model: the wrapped model, in evaluation mode.
        vocab_size: width of its logits, which may exceed the tokenizer's number of tokens.
        context_length: tokens that it can hold.
        feature_layers: decoder layers whose inputs are kept in the state (`features`); usually none. Number L, for a
            model of L layers, is the output of the last one.
        graphs: whether forward passes of shapes that come often are captured as CUDA graphs (`hf.load_hf`).

    Raises:
        UsageError: an architecture without a cache that can be rolled back (see `SUPPORTED`), or another `graphs`.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        tokenizer: Tokenizer,
        name: str,
        feature_layers: Sequence[int] = (),
        graphs: str = "auto",
    ) -> None:
        check_supported(hf_model.config, type(hf_model))
        hf_model.set_attn_implementation(ATTENTION)
        config = hf_model.config.get_text_config()
        head = hf_model.get_output_embeddings()
        self.name = name
        self.hf_model = hf_model.eval()
        self.tokenizer = tokenizer
        self.vocab_size = int(config.vocab_size if head is None else head.weight.shape[0])
        self.context_length = _context_length(config)
        self.device = hf_model.device
        self.graphs = Graphs(graphs, self.device, name)
        self.feature_layers = tuple(feature_layers)
        num_layers = len(decoder_layers(hf_model)) if self.feature_layers else 0
        if not all(type(layer) is int and 0 <= layer <= num_layers for layer in self.feature_layers):
            raise UsageError(
                f"feature_layers: expected layers from 0 to {num_layers} of {name}, got {list(self.feature_layers)}"
            )

    def with_features(self, layers: Sequence[int]) -> CausalLM:
        """The same model, whose states also keep the inputs of these decoder layers.

        Raises:
            UsageError: a layer that it does not have.
        """
        return CausalLM(self.hf_model, self.tokenizer, self.name, layers, self.graphs.switch)

    def features(self, state: RaggedCache, num_tokens: Sequence[int]) -> Tensor:
        """[B, W, F], W = max(num_tokens): of the last `num_tokens[b]` cached tokens of each row, in order.

        F is the width of all `feature_layers` together; slots behind a row's end hold zeros.
        """
        return state.last_features(num_tokens, len(self.feature_layers) * self.hidden_size, self.hf_model.dtype)

    @property
    def output_rows(self) -> Tensor:
        """[V, D] weights of the output layer.

        Raises:
            UsageError: it has none.
        """
        output = self.hf_model.get_output_embeddings()
        if output is None:
            raise UsageError(f"target: expected {self.name} to have an output layer, it has none")
        return cast(Tensor, output.weight).detach()

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.hf_model.config.get_text_config().hidden_size)

    @torch.inference_mode()
    def prefill(self, prefixes: Sequence[Sequence[int]]) -> RaggedCache:
        """State with `prefixes` cached; rows of similar length share a forward pass, and no logits are computed."""
        self._check_length(max(map(len, prefixes), default=0))
        state = RaggedCache(len(prefixes), self.device)
        for rows in _prefill_groups([len(prefix) for prefix in prefixes]):
            group = state if len(rows) == len(prefixes) else RaggedCache(len(rows), self.device)
            lengths = [len(prefixes[row]) for row in rows]
            longest = max(lengths)
            tokens = torch.zeros(len(rows), longest, dtype=torch.long)
            for slot, row in enumerate(rows):
                tokens[slot, : lengths[slot]] = torch.as_tensor(prefixes[row], dtype=torch.long)
            positions = group.begin(longest)
            with self._keeping_features(group):
                self.hf_model.base_model(
                    input_ids=tokens.to(self.device), position_ids=positions, cache=group, use_cache=True
                )
            group.end(longest)
            group.rollback(lengths)
            if group is not state:
                state.insert(rows, group)
        return state

    @torch.inference_mode()
    def score(self, state: RaggedCache, tokens: Tensor) -> tuple[Tensor, RaggedCache]:
        """Logits [B, Q, V], in the model's dtype, of the token after each of `tokens` [B, Q]; the longer state.

        Positions from `context_length` on are meant for filler only: they are clamped, and a state that still holds
        one when it is scored again raises `UsageError`.
        """
        num_rows, num_queries = tokens.shape
        if num_rows != len(state.lengths):
            raise ContractError(f"score: expected tokens of {len(state.lengths)} rows, got {num_rows}")
        if num_rows == 0 or num_queries == 0:
            return torch.empty(num_rows, num_queries, self.vocab_size, device=self.device), state
        self._check_length(state.longest)

        def forward(positions: Tensor, tokens: Tensor) -> tuple[Tensor]:
            positions = positions.clamp(max=self.context_length - 1)
            with self._keeping_features(state):
                output = self.hf_model(input_ids=tokens, position_ids=positions, cache=state, use_cache=True)
            return (output.logits,)

        (logits,) = state.extend(self.graphs, forward, tokens.to(self.device))
        return logits, state

    @torch.inference_mode()
    def score_parts(
        self, state: RaggedCache, parts: Sequence[Part], num_tokens: int
    ) -> tuple[list[Tensor], RaggedCache]:
        """See `interfaces.PartsModel`; the caches of the rows that a part reads are copied, one layer at a time."""
        self._check_length(state.longest)
        scored = []
        for rows, offsets, tokens in parts:
            steps = torch.arange(tokens.shape[1], device=self.device)
            positions = (state.lengths[rows] + offsets)[:, None] + steps
            view = CacheView(state, rows, positions, num_tokens)
            with self._keeping_features(view):
                output = self.hf_model(
                    input_ids=tokens.to(self.device), position_ids=positions, cache=view, use_cache=True
                )
            scored.append(output.logits)
        state.end(num_tokens)
        return scored, state

    def rollback(self, state: RaggedCache, lengths: Sequence[int]) -> RaggedCache:
        """Keep the first `lengths[b]` tokens of every row b; nothing is computed or read back."""
        state.rollback(lengths)
        return state

    @torch.inference_mode()
    def select(self, state: RaggedCache, rows: Sequence[int]) -> RaggedCache:
        """The state of `rows`, in that order."""
        return state.select(rows)

    @torch.inference_mode()
    def insert(self, state: RaggedCache, rows: Sequence[int], other: RaggedCache) -> RaggedCache:
        """`state` with its `rows` replaced by the rows of `other`, in order."""
        state.insert(rows, other)
        return state

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, T, F], and what the output layer reads [B, T, D], of whole rows [B, T], padded at their ends."""
        with self._tapped() as taken:
            output = self.hf_model.base_model(input_ids=tokens.clamp(min=0).to(self.device), use_cache=False)
        return torch.cat(taken, dim=-1), output.last_hidden_state

    @contextlib.contextmanager
    def _keeping_features(self, state: RaggedCache) -> Iterator[None]:
        """Have the forward pass inside append the features of its tokens to `state`."""
        if not self.feature_layers:
            yield
            return
        with self._tapped() as taken:
            yield
        state.append_features(torch.cat(taken, dim=-1))

    @contextlib.contextmanager
    def _tapped(self) -> Iterator[list[Tensor]]:
        """The list that the forward pass inside fills with the hidden states at `feature_layers`."""
        taken: dict[int, Tensor] = {}
        ordered: list[Tensor] = []
        layers = decoder_layers(self.hf_model)

        def tap_input(layer: int) -> Callable[..., None]:
            def tap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                taken[layer] = args[0] if args else kwargs["hidden_states"]

            return tap

        def tap_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            taken[len(layers)] = output[0] if isinstance(output, tuple) else output

        handles = [
            layers[layer].register_forward_pre_hook(tap_input(layer), with_kwargs=True)
            if layer < len(layers)
            else layers[-1].register_forward_hook(tap_output)
            for layer in self.feature_layers
        ]
        try:
            yield ordered
        finally:
            for handle in handles:
                handle.remove()
        ordered += [taken[layer] for layer in self.feature_layers]

    def _check_length(self, length: int) -> None:
        if length > self.context_length:
            raise UsageError(f"{self.name}: expected at most {self.context_length} tokens of context, got {length}")


def decoder_layers(hf_model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, found by its length: families name it differently."""
    num_layers = hf_model.config.get_text_config().num_hidden_layers
    for module in hf_model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UsageError(f"target: expected a list of {num_layers} decoder layers in {type(hf_model).__name__}, found none")


def check_supported(config: PreTrainedConfig, model_class: type | None) -> None:
    """Raise `UsageError` unless the architecture's cache can be rolled back; `model_class` is None if it is unknown."""
    name = model_class.__name__ if model_class else config.model_type
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown_layers = layer_types - {"full_attention", "sliding_attention"}
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif unknown_layers:
        reason = f"it has layers of type {', '.join(sorted(unknown_layers))}"
    elif model_class is None:
        return
    elif getattr(model_class, "_is_stateful", False):
        reason = "its layers keep a recurrent state, which cannot be rolled back"
    elif not getattr(model_class, "_supports_attention_backend", False):
        reason = "it does not attend through transformers' attention interface"
    elif config.model_type == "gpt_oss":
        reason = "its attention has sinks"
    else:
        return
    raise UsageError(f"model: {name} ({config.model_type}) is not supported: {reason}. Supported: {SUPPORTED}")


def _context_length(config: PreTrainedConfig) -> int:
    """Number of positions; for rotary scalings that change frequencies on the fly only those before the change.

    Behind it, the frequencies of the whole batch would depend on its longest row, and cached keys would be stale.
    """
    length = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") in ("dynamic", "longrope"):
        length = min(length, int(parameters.get("original_max_position_embeddings") or length))
    return length


def _prefill_groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The rows to prefill together, of similar length; empty rows are in no group."""
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if lengths[row] == 0:
            break
        longest = lengths[group[0]] if group else 0
        if group and (lengths[row] < _PREFILL_FILL * longest or (len(group) + 1) * longest > _PREFILL_TOKENS):
            yield sorted(group)
            group = []
        group.append(row)
    if group:
        yield sorted(group)
