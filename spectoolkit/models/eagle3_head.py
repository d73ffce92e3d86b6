"""The network of an EAGLE-3 draft head: its sizes, its parameters and its equations (Li et al., arXiv 2503.01840).

What it is fed, and when, is the matter of `eagle3`.

Symbols: B rows, N positions, D width of the head, F width of all features together, V target ids, V' draft ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


@dataclass(frozen=True)
class Eagle3Config:
    """What a head is built from.

    Attributes:
        layer: the decoder layer, in the terms of Llama; its `vocab_size` is the target's V.
        draft_vocab_size: V', rows of the output layer.
        feature_layers: the target's layers whose inputs are the features, from low to high.
        feature_size: width of one layer's hidden states in the target.
        norm_before_residual: whether the residual branch starts behind the norm of the fused features.
        norm_before_fc: whether the features are normalised before they are fused.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    feature_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high: 2, L / 2 and L - 3, as in the published heads."""
    return (2, num_layers // 2, num_layers - 3)


class _Attention(nn.Module):
    """The projections of an attention over [embedding, state]; names are those of the checkpoints."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, size, bias = config.hidden_size, head_dim(config), config.attention_bias
        num_key_heads = config.num_key_value_heads or config.num_attention_heads
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(2 * width, num_key_heads * size, bias=bias)
        self.v_proj = nn.Linear(2 * width, num_key_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=bias)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = LlamaMLP(config)


class Eagle3Head(nn.Module):
    """The network. Names of its parameters are those of the `speculators` layout.

    With x the token's embedding and g the fused features or the head's own state of the position before,

        h = r + attention([norm(x), norm(g)]),  r = g, or norm(g) with `norm_before_residual`
        h = h + mlp(norm(h)),  logits = W norm(h).
    """

    fc: nn.Linear
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer = config.layer
        self.config = config
        features = len(config.feature_layers) * config.feature_size
        self.input_norm = LlamaRMSNorm(features, layer.rms_norm_eps) if config.norm_before_fc else None
        self.fc = nn.Linear(features, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(layer)])
        self.norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(_with_head_dim(layer))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(layer.vocab_size, dtype=torch.bool))

    @property
    def layer(self) -> Any:
        return self.layers[0]

    @property
    def draft_ids(self) -> Tensor:
        """[V'] the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_draft_ids(self, ids: Tensor) -> None:
        """Draft id i stands for the target's id `ids[i]`; `ids` [V'] ascend."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def fuse(self, features: Tensor) -> Tensor:
        """Features [..., F] as states [..., D]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        return self.fc(features.to(self.fc.weight.dtype))

    def project(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual [B, N, D] and rotated queries, keys, values [B, H, N, size] of pairs [B, N, D] at `positions`."""
        residual, queries, keys, values = self._project(embedded, states, positions, with_queries=True)
        assert residual is not None
        assert queries is not None
        return residual, queries, keys, values

    def project_keys(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of pairs of which nothing else is asked."""
        _, _, keys, values = self._project(embedded, states, positions, with_queries=False)
        return keys, values

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The head's state [B, N, D] from the residual and the attention's output [B, N, heads * size]."""
        hidden = residual + self.layer.self_attn.o_proj(attended)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    def logits(self, states: Tensor) -> Tensor:
        """[..., V'] of states [..., D]."""
        return self.lm_head(self.norm(states))

    def _project(
        self, embedded: Tensor, states: Tensor, positions: Tensor, with_queries: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
        layer, attention = self.layer, self.layer.self_attn
        normed = layer.hidden_norm(states)
        pairs = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        size = head_dim(self.config.layer)

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, size)).transpose(1, 2)

        cos, sin = self.rotary(pairs, positions)
        keys, values = heads(attention.k_proj(pairs)), heads(attention.v_proj(pairs))
        if not with_queries:
            return None, None, apply_rotary_pos_emb(keys, keys, cos, sin)[0], values
        queries, keys = apply_rotary_pos_emb(heads(attention.q_proj(pairs)), keys, cos, sin)
        return (normed if self.config.norm_before_residual else states), queries, keys, values


def head_dim(config: LlamaConfig) -> int:
    """Width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _with_head_dim(config: LlamaConfig) -> LlamaConfig:
    config.head_dim = head_dim(config)
    return config
