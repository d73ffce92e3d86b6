"""Tiny random causal language models of many families, in float64, with a tokenizer of one token per character."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.eagle3_head import Eagle3Config, Eagle3Head
from spectoolkit.models.hf import wrap

SLIDING_WINDOW = 5

# What a family needs beyond the sizes that all share.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": SLIDING_WINDOW},
    "gemma2": {"head_dim": 8, "sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 8},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 64},
    "gpt_neox": {"num_key_value_heads": None},
    "phi": {},
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
}


def tiny_model(family: str = "llama", vocab_size: int = 40, layers: int = 3, seed: int = 0) -> CausalLM:
    """A random model of `family`, a key of `FAMILIES`; equal arguments give equal weights."""
    options = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **FAMILIES[family],
    }
    config = AutoConfig.for_model(family, **{key: value for key, value in options.items() if value is not None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf_model = AutoModelForCausalLM.from_config(config)
        for parameter in hf_model.parameters():
            # Larger than the usual initial weights, which make nearly uniform laws that depend on nothing.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return wrap(hf_model.double(), tiny_tokenizer(vocab_size), f"tiny {family}")


def tiny_tokenizer(vocab_size: int = 40) -> PreTrainedTokenizerFast:
    """ "<end>" is 0, "<unknown>" is 1, then come the printable characters; a chat template marks roles with letters."""
    names = ["<end>", "<unknown>", *string.printable[: max(0, vocab_size - 2)]][:vocab_size]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>")
    fast.chat_template = "{% for m in messages %}{{ m['role'][0] + m['content'] + '<end>' }}{% endfor %}a"
    return fast


def tiny_head(
    target: CausalLM,
    draft_vocab_size: int = 25,
    seed: int = 5,
    feature_layers: tuple[int, ...] = (0, 1, 3),
    **options: Any,
) -> Eagle3:
    """A random EAGLE-3 head for `target`, in float64."""
    layer = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(Eagle3Config(layer, draft_vocab_size, feature_layers, 32, **options))
        for parameter in head.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size]
    head.set_draft_ids(ids.sort().values)
    return Eagle3(head.double().eval(), target, "tiny head")
