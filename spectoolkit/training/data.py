"""Sampled text as batches of training examples, and the target's hidden states for them, kept on disk."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spectoolkit.errors import RunError
from spectoolkit.files import replace
from spectoolkit.functional.ragged import pad_rows
from spectoolkit.models.causal_lm import CausalLM

_POOL = 8
"""Batches whose examples are sorted by length together, so that little of a batch is padding."""


@dataclass(frozen=True)
class Example:
    """One prompt, of two tokens or more, and one output of the target for it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def name(self) -> str:
        """A hash of everything in it."""
        return hashlib.sha256(repr((self.prompt, self.output)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Batch:
    """Examples of similar length.

    Attributes:
        examples: B of them.
        tokens: [B, N] their outputs, padded with -1.
        inputs: [B, N] the token before each.
    """

    examples: tuple[Example, ...]
    tokens: Tensor
    inputs: Tensor

    @staticmethod
    def of(examples: Sequence[Example]) -> Batch:
        tokens = pad_rows([example.output for example in examples])
        last = torch.tensor([example.prompt[-1:] for example in examples])
        return Batch(tuple(examples), tokens, torch.cat([last, tokens[:, :-1]], dim=1))

    def to(self, device: torch.device) -> Batch:
        return Batch(self.examples, self.tokens.to(device), self.inputs.to(device))

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(example.prompt for example in self.examples)


@dataclass(frozen=True)
class Hidden:
    """What a head reads of the target, and what the target's own law follows from.

    Attributes:
        of_prompts: [B, M - 1, F] features of all prompt tokens but the last, M the longest prompt; zeros behind the end
            of a row, here and below.
        of_inputs: [B, N, F] features of the token before each of `Batch.inputs`.
        last: [B, N, D] what the target's output layer reads behind `Batch.inputs`.
    """

    of_prompts: Tensor
    of_inputs: Tensor
    last: Tensor


_FIELDS = tuple(field.name for field in fields(Hidden))


def batches(examples: Sequence[Example], batch_size: int, seed: int) -> list[Batch]:
    """All examples in batches of at most `batch_size`, of similar lengths each; which ones depends on the seed."""
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    found: list[Batch] = []
    for begin in range(0, len(order), batch_size * _POOL):
        pool = sorted(
            order[begin : begin + batch_size * _POOL],
            key=lambda i: (len(examples[i].output), len(examples[i].prompt)),
        )
        found += [Batch.of([examples[i] for i in pool[k : k + batch_size]]) for k in range(0, len(pool), batch_size)]
    return found


def frequent_ids(examples: Iterable[Example], num_ids: int, vocab_size: int) -> Tensor:
    """The `num_ids` ids that occur most often in the outputs, ascending; of equally frequent ones the lowest.

    A head with these draft ids can propose all but the rarest tokens.
    """
    counts = Counter(token for example in examples for token in example.output)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:num_ids]))


class HiddenCache:
    """Hidden states of examples, computed when they are first asked for and kept in a folder within a budget.

    What does not fit into the budget is computed every time. A file, of one example, appears whole or not at all, and
    serves every batch that the example is in.

    Args:
        target: with the features of the head.
        folder: of one target and one set of features.
        budget_bytes: of all files there.

    Raises:
        RunError: the disk has less than the budget left, or a file cannot be written.
    """

    def __init__(self, target: CausalLM, folder: Path, budget_bytes: int) -> None:
        self._target = target
        self._folder = folder
        self._left = budget_bytes - sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if self._left > free:
            raise RunError(
                f"{folder}: expected room for the {budget_bytes / 1e9:.1f} GB that feature_cache_gb allows, got "
                f"{free / 1e9:.1f} GB; say a smaller study.feature_cache_gb (0 keeps nothing)"
            )

    def get(self, batch: Batch) -> Hidden:
        """Hidden states of `batch`, on the target's device."""
        paths = [self._folder / f"{example.name}.safetensors" for example in batch.examples]
        if all(path.is_file() for path in paths):
            rows = [load_file(path, device=str(self._target.device)) for path in paths]
            return Hidden(*(pad_sequence([row[name] for row in rows], batch_first=True) for name in _FIELDS))
        hidden = hidden_of(self._target, batch)
        for row, (example, path) in enumerate(zip(batch.examples, paths, strict=True)):
            lengths = (len(example.prompt) - 1, len(example.output), len(example.output))
            tensors = {
                name: getattr(hidden, name)[row, :length].clone() for name, length in zip(_FIELDS, lengths, strict=True)
            }
            size = sum(tensor.nbytes for tensor in tensors.values())
            if size < self._left and not path.is_file():
                replace(path, partial(save_file, tensors))
                self._left -= size
        return hidden


def hidden_of(target: CausalLM, batch: Batch) -> Hidden:
    """One forward of the target over prompts and outputs."""
    device = target.device
    whole = pad_rows([[*example.prompt, *example.output[:-1]] for example in batch.examples])
    features, last = target.hidden_states(whole)
    sizes = torch.tensor([len(prompt) for prompt in batch.prompts], device=device)
    behind = sizes[:, None] - 1 + torch.arange(batch.tokens.shape[1], device=device)  # place of each input

    def at(values: Tensor, places: Tensor, is_there: Tensor) -> Tensor:
        places = places.clamp(0, values.shape[1] - 1)[..., None].expand(-1, -1, values.shape[2])
        return values.gather(1, places) * is_there[..., None]

    is_output = batch.tokens.to(device) >= 0
    of_prompt = torch.arange(int(sizes.max()) - 1, device=device).expand(len(sizes), -1)
    is_prompt = of_prompt < sizes[:, None] - 1
    return Hidden(at(features, of_prompt, is_prompt), at(features, behind - 1, is_output), at(last, behind, is_output))
