"""Draft heads on disk: the layout of the original EAGLE-3 checkpoints, and that of `speculators`, which is written too.

Both are a folder with `config.json` and one or more weight files, and share the names of most tensors:

| here and `speculators` | original | |
|---|---|---|
| `fc.weight` | the same | [D, F] |
| `layers.0.*` | `midlayer.*` | the decoder layer; q, k and v read [embedding, state], 2 D wide |
| `norm.weight`, `lm_head.weight` | the same | [D], [V', D] |
| `d2t` | the same | [V'] target id minus draft id |
| `t2d` | the same | [V] whether a target id has a draft id |
| `embed_tokens.weight` | not there | [V, D]; the target's where there is none |

A folder without `lm_head.weight` means the target's own output rows of its draft ids: a head whose output layer was not
trained need not carry it.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from spectoolkit.errors import UsageError
from spectoolkit.files import writing
from spectoolkit.models.causal_lm import CausalLM, decoder_layers
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.eagle3_head import Eagle3Config, Eagle3Head, default_feature_layers

MAPS = ("d2t", "t2d")
OPTIONAL = ("lm_head.weight", "embed_tokens.weight", *MAPS)
IGNORED = ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")


def load_eagle3(target: CausalLM, model: str, revision: str | None = None) -> Eagle3:
    """The draft head in a local folder or hub repository, in the target's dtype and on its device.

    Args:
        model: folder or repository id, in either layout.
        revision: branch, tag or commit of the repository; null is its default branch.

    Raises:
        UsageError: nothing loadable there, tensors that are missing, unexpected or of another shape, or the head of
            another target (width, vocabulary, layers).
    """
    if not isinstance(target, CausalLM):
        raise UsageError(f"draft_model: expected a transformers target for a draft head, got {type(target).__name__}")
    head, embedding = read_head(target, model, revision)
    dtype = target.hf_model.dtype
    embed = None if embedding is None else nn.Embedding.from_pretrained(embedding.to(target.device, dtype))
    head = head.to(target.device, dtype).eval().requires_grad_(False)
    return Eagle3(head, target, f"EAGLE-3 head {Path(model).name}", embed)


def read_head(target: CausalLM, model: str, revision: str | None = None) -> tuple[Eagle3Head, Tensor | None]:
    """The weights of `load_eagle3` in float32, on the CPU, and the rows [V, D] of their own embedding if there is one.

    Raises:
        UsageError: see `load_eagle3`.
    """
    folder = _folder(model, revision)
    config = read_config(folder, model, target)
    tensors = _tensors(folder, model)
    with torch.device("meta"):
        head = Eagle3Head(config)
    _check_tensors(head, tensors, model, target)
    state = {name: tensors[name] for name in head.state_dict() if name in tensors}
    draft_size, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    state.setdefault("d2t", torch.zeros(draft_size, dtype=torch.int64))
    ids = state["d2t"].long() + torch.arange(draft_size)
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) < len(ids):
        raise UsageError(
            f"draft_model: expected d2t of {model!r} to name {draft_size} different ids below {vocab_size}"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    if not torch.equal(state.setdefault("t2d", t2d).bool(), t2d):
        raise UsageError(f"draft_model: d2t and t2d of {model!r} contradict each other")
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = _output_rows(target, config, model)[ids.to(target.device)]
    # Built again on the CPU: the rotary frequencies are no part of the files.
    head = Eagle3Head(config)
    head.load_state_dict(state)
    return head, tensors.get("embed_tokens.weight")


def load_packaged_eagle3(target: CausalLM, name: str, sha256: str) -> Eagle3:
    """A head that comes with this package.

    Args:
        name: of the target that it was trained for, and of its folder in `spectoolkit/data/eagle3`.
        sha256: of its weight file, so that results say which weights they are from.

    Raises:
        UsageError: another target, or a weight file that is missing or another one.
    """
    if target.name != name:
        raise UsageError(
            f"draft_model: expected the target {name}, for which this head was trained, got {target.name}; give a head "
            "with draft_model=eagle3 draft_model.model=..., train one with experiment=train_draft_head, or choose a "
            "draft model with draft_model=hf draft_model.model=..."
        )
    folder = Path(str(importlib.resources.files("spectoolkit") / "data" / "eagle3" / name))
    file = folder / "model.safetensors"
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no file"
    if found != sha256:
        raise UsageError(
            f"draft_model: expected {file} with the SHA-256 {sha256}, got {found}; install the package anew"
        )
    return load_eagle3(target, str(folder))


def read_config(folder: Path, model: str, target: CausalLM) -> Eagle3Config:
    """`config.json` of either layout, checked against the target.

    Raises:
        UsageError: see `load_eagle3`.
    """
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise UsageError(f"draft_model: expected a config.json in {model!r} ({error})") from error
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UsageError(f"draft_model: expected an EAGLE-3 head in {model!r}, got speculators_model_type {kind!r}")
    layer_settings: Mapping[str, Any] = raw.get("transformer_layer_config", {}) if kind else raw
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if absent := [name for name in sizes if not isinstance(layer_settings.get(name), int)]:
        raise UsageError(f"draft_model: config.json of {model!r} lacks {', '.join(absent)}")
    if layer_settings.get("num_hidden_layers", 1) != 1:
        raise UsageError(
            f"draft_model: expected a head of one decoder layer in {model!r}, got "
            f"{layer_settings['num_hidden_layers']}: is this a whole model (draft_model=hf)?"
        )
    ours = {name for name in vars(LlamaConfig()) if not name.startswith("_")} | {"rope_theta", "rope_scaling"}
    dropped = {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type"}
    layer = LlamaConfig(**{key: value for key, value in layer_settings.items() if key in ours - dropped})
    target_config = target.hf_model.config.get_text_config()
    layers = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    num_layers = len(decoder_layers(target.hf_model))
    layers = default_feature_layers(num_layers) if layers is None else tuple(layers)
    if not all(type(number) is int and 0 <= number <= num_layers for number in layers):
        raise UsageError(
            f"draft_model: {model!r} reads the target's layers {list(layers)}, and {target.name} has {num_layers}"
        )
    config = Eagle3Config(
        layer=layer,
        draft_vocab_size=raw.get("draft_vocab_size") or layer.vocab_size,
        feature_layers=layers,
        feature_size=raw.get("target_hidden_size") or layer.hidden_size,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
    )
    for what, ours_, theirs in (
        ("hidden size", config.feature_size, target.hidden_size),
        ("vocabulary", layer.vocab_size, target_config.vocab_size),
    ):
        if ours_ != theirs:
            raise UsageError(
                f"draft_model: {model!r} is a head for another target: its {what} is {ours_}, that of {target.name} "
                f"{theirs}"
            )
    return config


def save_eagle3(
    head: Eagle3Head,
    folder: Path,
    target_name: str,
    target_class: str,
    num_draft_tokens: int,
    dtype: torch.dtype,
    *,
    with_output: bool = True,
) -> None:
    """Write a head in the `speculators` layout; the folder appears complete or not at all, an older one is replaced.

    Args:
        target_name, target_class: name or path and class of the target, for serving engines.
        num_draft_tokens: tokens that it was trained to draft per step.
        dtype: of the written weights.
        with_output: whether the output rows are written; without them, readers other than this module take them for
            missing.

    Raises:
        RunError: the folder cannot be written.
    """
    config = head.config
    layer = config.layer.to_dict()
    layer["rope_theta"] = (config.layer.rope_parameters or {}).get("rope_theta", 10000.0)
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.feature_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "embed_requires_grad": False,
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": [target_class]},
        },
    }
    tensors = {
        name: (tensor if name in MAPS else tensor.to(dtype)).contiguous().cpu()
        for name, tensor in head.state_dict().items()
        if with_output or name != "lm_head.weight"
    }
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            save_file(tensors, temporary / "model.safetensors")
            (temporary / "config.json").write_text(json.dumps(written, indent=2, default=str) + "\n", encoding="utf-8")
            temporary.chmod(0o755)
            (temporary / "model.safetensors").chmod(0o644)
            if folder.exists():
                folder.rename(temporary / "before")
            temporary.rename(folder)
            shutil.rmtree(folder / "before", ignore_errors=True)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _folder(model: str, revision: str | None) -> Path:
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UsageError(f"draft_model: expected a folder or hub repository, got {model!r}, which does not exist")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"draft_model: expected a folder or hub repository, got {model!r}, which could not be loaded ({message[0]})"
        ) from error


def _tensors(folder: Path, model: str) -> dict[str, Tensor]:
    """All tensors of the weight files, under this module's names."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise UsageError(f"draft_model: expected model.safetensors or pytorch_model.bin in {model!r}, got neither")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            part = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        except Exception as error:  # whatever a broken file makes the readers raise
            raise UsageError(f"draft_model: {file.name} of {model!r} cannot be read ({error})") from error
        found |= {_renamed(name): tensor for name, tensor in part.items()}
    return found


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _check_tensors(head: Eagle3Head, tensors: Mapping[str, Tensor], model: str, target: CausalLM) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    config = head.config
    expected["embed_tokens.weight"] = (config.layer.vocab_size, config.layer.hidden_size)
    required = set(expected) - set(OPTIONAL)
    if config.draft_vocab_size != config.layer.vocab_size:
        required.add("d2t")
    width = cast(nn.Embedding, target.hf_model.get_input_embeddings()).weight.shape[1]
    if config.layer.hidden_size != width:
        required.add("embed_tokens.weight")
    problems = [f"missing {name} {list(expected[name])}" for name in sorted(required - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys() - set(IGNORED))]
    problems += [
        f"{name}: expected shape {list(shape)}, got {list(tensors[name].shape)}"
        for name, shape in sorted(expected.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems += [f"{name} holds NaN or infinities" for name in sorted(tensors) if not _is_finite(tensors[name])]
    if problems:
        raise UsageError(f"draft_model: {model!r} is not a head that can be loaded: {'; '.join(problems)}")


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _output_rows(target: CausalLM, config: Eagle3Config, model: str) -> Tensor:
    """[V, D] of the target's output layer."""
    rows = target.output_rows
    if rows.shape[1] != config.layer.hidden_size:
        raise UsageError(f"draft_model: {model!r} has no lm_head.weight, and that of {target.name} does not fit")
    return rows
