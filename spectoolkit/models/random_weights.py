"""Language models with random weights: where only the time around their forward passes matters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spectoolkit.errors import UsageError
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.cuda_graphs import parse_switch
from spectoolkit.models.hf import parse_device, parse_dtype
from spectoolkit.prompts import Prompt

_STD = 0.3  # of all matrices: larger than usual, which would make nearly uniform laws


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255; nothing ends an output."""

    stop_ids: frozenset[int] = frozenset()

    def encode(self, prompt: Prompt, chat_template: bool) -> list[int]:
        """Bytes of the prompt's text, or of its messages one after the other; there is no chat template to apply."""
        texts = [prompt.text] if prompt.messages is None else [message.content for message in prompt.messages]
        return [byte for text in texts for byte in (text or "").encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes; ids above 255, and bytes that are no text, become replacement characters."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens).decode(errors="replace")


def random_llama(
    num_layers: int = 2,
    hidden_size: int = 64,
    vocab_size: int = 256,
    num_heads: int = 4,
    context_length: int = 2048,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    graphs: str = "auto",
) -> CausalLM:
    """A Llama with random weights; equal arguments give equal weights.

    Raises:
        UsageError: a size below 1, fewer than 256 tokens, a width that the heads do not share evenly, or as `load_hf`.
    """
    sizes = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads, "context": context_length}
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name}: expected an integer >= 1, got {value!r}")
    if vocab_size < 256:
        raise UsageError(f"vocab_size: expected at least 256, since tokens are bytes, got {vocab_size!r}")
    if hidden_size % (2 * num_heads):
        raise UsageError(f"hidden_size: expected a multiple of 2 * num_heads = {2 * num_heads}, got {hidden_size!r}")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=context_length,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch_device = parse_device(device)
    torch_dtype = parse_dtype(dtype, torch_device)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=_STD, generator=generator)
    if isinstance(torch_dtype, torch.dtype):
        model.to(torch_dtype)  # pyright: ignore  # its declaration hides that of nn.Module
    model.to(torch_device)  # pyright: ignore
    name = f"random Llama ({num_layers} layers of width {hidden_size})"
    return CausalLM(model, ByteTokenizer(), name, graphs=parse_switch(graphs))


def random_llama_draft(target: CausalLM, share: float = 0.9, seed: int = 1) -> CausalLM:
    """A draft model for a random target: `share` of each matrix's variance is the target's, the rest random.

    Raises:
        UsageError: a share outside [0, 1], or a target that is no such model.
    """
    if not 0 <= share <= 1:
        raise UsageError(f"draft_model.share: expected a number in [0, 1], got {share!r}")
    source = getattr(target, "hf_model", None)
    if not isinstance(source, LlamaForCausalLM) or not isinstance(target.tokenizer, ByteTokenizer):
        raise UsageError(f"draft_model: expected a target=random for a random draft model, got {target.name}")
    model = LlamaForCausalLM(source.config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter, given in zip(model.parameters(), source.parameters(), strict=True):
            other = torch.empty(given.shape).normal_(std=_STD, generator=generator) if given.dim() > 1 else 0
            parameter.copy_(given.cpu().float() * share**0.5 + other * (1 - share) ** 0.5 if given.dim() > 1 else given)
    model.to(device=target.device, dtype=source.dtype)  # pyright: ignore
    return CausalLM(model, target.tokenizer, f"{target.name}, {share:g} of it", graphs=target.graphs.switch)
