"""A head before its training: sizes and first weights from the target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from spectoolkit.errors import UsageError
from spectoolkit.models.causal_lm import CausalLM, decoder_layers
from spectoolkit.models.eagle3_files import read_head
from spectoolkit.models.eagle3_head import Eagle3Config, Eagle3Head, default_feature_layers

_STD = 0.02


def head_config(target: CausalLM, draft_vocab_size: int, feature_layers: tuple[int, ...] | None = None) -> Eagle3Config:
    """A head with the widths of the target's own decoder layers.

    Raises:
        UsageError: more draft ids than the target has, or a target of fewer than four layers without `feature_layers`.
    """
    config = target.hf_model.config.get_text_config()
    if not 1 <= draft_vocab_size <= target.vocab_size:
        raise UsageError(
            f"draft_vocab_size: expected a number from 1 to the target's {target.vocab_size}, got {draft_vocab_size}"
        )
    num_layers = len(decoder_layers(target.hf_model))
    if feature_layers is None and num_layers < 6:
        raise UsageError(
            f"target: expected six layers or more to take features of, got {num_layers}; say feature_layers"
        )
    rope = getattr(config, "rope_parameters", None)
    default_rope = {"rope_type": "default", "rope_theta": 10000.0}
    layer = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        hidden_act=getattr(config, "hidden_act", None) or "silu",
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        rope_parameters=dict(rope) if isinstance(rope, dict) and "rope_theta" in rope else default_rope,
        tie_word_embeddings=False,
    )
    layers = tuple(feature_layers or default_feature_layers(num_layers))
    return Eagle3Config(layer, draft_vocab_size, layers, target.hidden_size)


@torch.no_grad()
def fresh_head(target: CausalLM, config: Eagle3Config, draft_ids: Tensor, seed: int) -> Eagle3Head:
    """An untrained head, in float32 on the target's device.

    Where the shapes allow, its decoder layer and norms are those of the target's last layer, what it fuses is the
    highest of the features, and its output rows are the target's; all else is small and random.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config)
        for parameter in head.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_STD)
    head.set_draft_ids(draft_ids.cpu())
    width, last = config.layer.hidden_size, decoder_layers(target.hf_model)[-1]
    source = dict(last.named_parameters())
    for name, parameter in head.layer.named_parameters():
        given = source.get(name)
        if given is None:
            continue
        if parameter.shape == given.shape:
            parameter.copy_(given)
        elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") and given.shape == (len(parameter), width):
            parameter[:, width:] = given.float().cpu()
    if "input_layernorm.weight" in source and source["input_layernorm.weight"].shape == (width,):
        head.layer.hidden_norm.weight.copy_(source["input_layernorm.weight"])
        head.layer.input_layernorm.weight.fill_(1.0)
    head.fc.weight[:, -config.feature_size :] += torch.eye(width, config.feature_size)
    rows = target.output_rows
    if rows.shape[1] == width:
        head.lm_head.weight.copy_(rows[draft_ids.to(rows.device)])
    norm = getattr(target.hf_model.base_model, "norm", None)
    if norm is not None and norm.weight.shape == (width,):
        head.norm.weight.copy_(norm.weight)
    return head.to(target.device)


def trained_head(target: CausalLM, model: str, draft_ids: Tensor) -> Eagle3Head:
    """A head from a folder or hub repository to go on training, in float32 on the target's device.

    Its draft ids become `draft_ids` where its output rows are the target's; a head with rows of its own keeps its ids.

    Raises:
        UsageError: see `eagle3_files.load_eagle3`; another number of draft ids than a head with rows of its own has, or
            a head with an embedding of its own.
    """
    head, embedding = read_head(target, model)
    if embedding is not None:
        raise UsageError(f"study.start: expected a head that reads the target's embedding, {model!r} has its own")
    head = head.to(target.device)
    if has_output_of(head, target):
        return with_draft_ids(head, target, draft_ids).train()
    if len(head.d2t) != len(draft_ids):
        raise UsageError(
            f"study.draft_vocab_size: expected the {len(head.d2t)} ids of the trained output layer of {model!r}, got "
            f"{len(draft_ids)}"
        )
    return head


def has_output_of(head: Eagle3Head, target: CausalLM) -> bool:
    """Whether the head's output layer is the target's rows of its draft ids, up to the rounding of a float16 file."""
    rows, own = target.output_rows[head.draft_ids].float(), head.lm_head.weight.detach().float()
    return rows.shape == own.shape and torch.allclose(own, rows, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def with_draft_ids(head: Eagle3Head, target: CausalLM, draft_ids: Tensor) -> Eagle3Head:
    """The head with other draft ids, its output layer being the target's rows of them; nothing else changes.

    A head that was trained against the target's own rows has learnt where to point, not which ids there are.

    Raises:
        UsageError: an output layer that is not the target's rows (it was trained itself).
    """
    rows = target.output_rows
    if not has_output_of(head, target):
        raise UsageError(
            "written_vocab_size: expected a head whose output layer was not trained (trains_output: false)"
        )
    other = Eagle3Head(replace(head.config, draft_vocab_size=len(draft_ids)))
    kept = {name: tensor for name, tensor in head.state_dict().items() if name not in ("lm_head.weight", "d2t", "t2d")}
    other.load_state_dict(kept, strict=False)
    other.set_draft_ids(draft_ids.cpu())
    other.lm_head.weight.copy_(rows[draft_ids.to(rows.device)])
    return other.to(head.fc.weight.device).eval()
