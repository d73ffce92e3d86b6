"""Tokenizers from transformers checkpoints: text and tokens, the ends of outputs, and whether two are the same."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from spectoolkit.interfaces import Tokenizer
from spectoolkit.prompts import Prompt, render


class HFTokenizer:
    """A transformers tokenizer as `interfaces.Tokenizer`.

    Attributes:
        hf_tokenizer: the wrapped tokenizer.
        stop_ids: the ids that end an output.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int] = frozenset()) -> None:
        self.hf_tokenizer = hf_tokenizer
        self.stop_ids = stop_ids

    def encode(self, prompt: Prompt, chat_template: bool) -> list[int]:
        """Token ids of `prompt`; see `prompts.render`."""
        return render(prompt, self.hf_tokenizer, chat_template)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special tokens left out."""
        text = self.hf_tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def stop_ids(hf_model: PreTrainedModel, hf_tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end tokens of generation config, config and tokenizer; of a chat model the end of turn is among the first."""
    sources = (hf_model.generation_config, hf_model.config.get_text_config(), hf_tokenizer)
    ids: set[int] = set()
    for source in sources:
        found = getattr(source, "eos_token_id", None)
        ids.update(found if isinstance(found, (list, tuple)) else [] if found is None else [found])
    return frozenset(ids)


def tokenizer_difference(first: Tokenizer, second: Tokenizer) -> str | None:
    """How the ids of two tokenizers differ, in words, or None if they do not."""
    if first is second:
        return None
    if not isinstance(first, HFTokenizer) or not isinstance(second, HFTokenizer):
        return f"a {type(first).__name__} cannot be compared with a {type(second).__name__}"
    ours, theirs = first.hf_tokenizer.get_vocab(), second.hf_tokenizer.get_vocab()
    if ours == theirs:
        return None
    tokens = {index: token for token, index in ours.items()}
    others = {index: token for token, index in theirs.items()}
    index = min(index for index in tokens.keys() | others.keys() if tokens.get(index) != others.get(index))
    return (
        f"{len(ours)} tokens against {len(theirs)}, and the first id that differs is {index}: "
        f"{tokens.get(index)!r} against {others.get(index)!r}"
    )
