"""Models from transformers checkpoints, local or from the hub: what is asked for is checked before anything is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as transformers_logging

from spectoolkit.errors import UsageError
from spectoolkit.models.causal_lm import CausalLM, check_supported
from spectoolkit.models.cuda_graphs import parse_switch
from spectoolkit.models.hf_tokenizer import HFTokenizer, stop_ids, tokenizer_difference

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def load_hf(
    model: str,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    graphs: str = "auto",
) -> CausalLM:
    """The causal language model in a local folder or hub repository.

    Args:
        model: folder or repository id.
        dtype: "bfloat16", "float16", "float32", "float64", or "auto": bfloat16 on a GPU, else as the checkpoint is.
        device: "cpu", "cuda", "cuda:1", ..., or "auto": the GPU if there is one.
        trust_remote_code: whether code that comes with the checkpoint may run.
        revision: branch, tag or commit of the repository; null is its default branch.
        graphs: "auto" replays forward passes of shapes that come often as CUDA graphs, on a GPU and where the
            architecture allows it; "off" never does. Results differ by the rounding of the attention at most.

    Raises:
        UsageError: an unknown dtype, device or switch, nothing loadable under `model`, or an unsupported architecture.
    """
    switch = parse_switch(graphs)
    torch_device = parse_device(device)
    torch_dtype = parse_dtype(dtype, torch_device)
    _check_folder(model)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        config = AutoConfig.from_pretrained(model, **options)
        check_supported(config, _model_class(config))
        hf_tokenizer = AutoTokenizer.from_pretrained(model, **options)
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                model, dtype=torch_dtype, config=config, output_loading_info=True, **options
            )
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        # transformers reports a missing repository, missing files, no network and unknown architectures as these.
        raise UsageError(
            f"model: expected a folder or hub repository with a causal language model, got {model!r}, which could not "
            f"be loaded ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
        ) from error
    hf_model, report = loaded
    if report["missing_keys"]:
        # transformers would go on with random numbers.
        raise UsageError(
            f"model: expected all weights of a {type(hf_model).__name__}, got {model!r}, in which "
            f"{len(report['missing_keys'])} are missing: {', '.join(sorted(report['missing_keys'])[:3])}, ..."
        )
    return wrap(hf_model.to(torch_device), hf_tokenizer, model, switch)


def load_draft_hf(
    target: Any,
    model: str,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    graphs: str = "auto",
) -> CausalLM:
    """A draft model of its own for `target`, as `load_hf`; device "auto" is where the target is, and no other will do.

    The widths of the logits may differ (padding of the vocabulary), the tokenizers may not.

    Raises:
        UsageError: as `load_hf`, another device than the target's, or tokenizers that differ.
    """
    place = target.device if device == "auto" else parse_device(device)
    if (place.type, place.index or 0) != (target.device.type, target.device.index or 0):
        raise UsageError(f"draft_model.device: expected auto or that of the target, {target.device}, got {device!r}")
    draft = load_hf(model, dtype, str(target.device), trust_remote_code, revision, graphs)
    difference = tokenizer_difference(target.tokenizer, draft.tokenizer)
    if difference is not None:
        raise UsageError(
            f"draft_model: expected the tokenizer of the target {target.name!r}, got another one in {model!r}: "
            f"{difference}. Draft tokens are ids, so both models must mean the same by them"
        )
    return draft


def wrap(hf_model: PreTrainedModel, hf_tokenizer: PreTrainedTokenizerBase, name: str, graphs: str = "auto") -> CausalLM:
    """The model with its tokenizer; outputs stop at the end tokens that either of them names."""
    return CausalLM(hf_model, HFTokenizer(hf_tokenizer, stop_ids(hf_model, hf_tokenizer)), name, graphs=graphs)


def parse_device(device: str) -> torch.device:
    """The device called `device`; "auto" is the GPU if there is one. Raises `UsageError` if it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device: expected auto, cpu, cuda or cuda:<number>, got {device!r}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise UsageError(f"device: expected auto, cpu, cuda or cuda:<number>, got {device!r}")
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device: expected a device of this machine, which has no usable GPU, got {device!r}")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device: expected one of {torch.cuda.device_count()} GPUs, got {device!r}")
    return parsed


def parse_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype called `dtype`; "auto" is bfloat16 on a GPU and "auto" (the checkpoint's own) elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else "auto"
    if dtype not in DTYPES:
        raise UsageError(f"dtype: expected auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing its progress bars."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _check_folder(name: str) -> None:
    """Raise `UsageError` if `name` is meant as a folder but holds no model; `owner/name` may also be a repository."""
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise UsageError(
                f"model: expected a folder with a transformers model, got {name!r}, which has no config.json"
            )
    elif os.path.exists(name):
        raise UsageError(f"model: expected a folder or hub repository, got the file {name!r}")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"model: expected a folder or hub repository, got {name!r}, which does not exist")


def _model_class(config: PreTrainedConfig) -> type | None:
    """The class that would be loaded, so that a refusal comes before gigabytes are read; None if it is remote code."""
    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found
