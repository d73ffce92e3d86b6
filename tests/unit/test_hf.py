from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast

from spectoolkit.errors import UsageError
from spectoolkit.models.hf import load_draft_hf, load_hf, parse_device
from spectoolkit.models.hf_tokenizer import HFTokenizer, stop_ids, tokenizer_difference
from spectoolkit.models.tabular import random_tabular
from spectoolkit.prompts import Message, Prompt
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


def save(path: Path, vocab_size: int = 40, num_tokens: int = 40, seed: int = 0) -> Path:
    """A checkpoint whose logits are `vocab_size` wide and whose tokenizer knows `num_tokens` tokens."""
    tiny_model("llama", vocab_size=vocab_size, seed=seed).hf_model.save_pretrained(path)
    tiny_tokenizer(num_tokens).save_pretrained(path)
    return path


def test_local_folder(folder: Path) -> None:
    model = load_hf(str(folder), device="cpu")
    assert model.name == str(folder)
    assert (model.vocab_size, model.context_length, model.device) == (40, 96, torch.device("cpu"))
    assert model.hf_model.dtype == torch.float64
    assert not model.hf_model.training
    assert model.tokenizer.stop_ids == {0}
    original = tiny_model("llama")
    tokens = torch.tensor([[4, 5, 6]])
    logits, _ = model.score(model.prefill([[1, 2, 3]]), tokens)
    expected, _ = original.score(original.prefill([[1, 2, 3]]), tokens)
    torch.testing.assert_close(logits, expected)
    assert not logits.requires_grad


def test_dtype(folder: Path) -> None:
    model = load_hf(str(folder), dtype="bfloat16", device="cpu")
    logits, _ = model.score(model.prefill([[1, 2, 3], [4]]), torch.tensor([[4], [5]]))
    assert logits.dtype == torch.bfloat16


def test_tokenizer(folder: Path) -> None:
    tokenizer = load_hf(str(folder), device="cpu").tokenizer
    text = Prompt(id="1", category="c", text="0a")
    assert tokenizer.encode(text, chat_template=False) == [2, 12]
    chat = Prompt(id="1", category="c", messages=(Message("user", "0"),))
    ids = tokenizer.encode(chat, chat_template=True)
    assert tokenizer.decode(ids) == "u0a"
    assert tokenizer.decode([2, 3, 0]) == "01"


def test_stop_ids_come_from_every_source() -> None:
    hf_model = tiny_model("llama").hf_model
    assert hf_model.generation_config is not None
    hf_model.generation_config.eos_token_id = [3, 4]
    hf_model.config.eos_token_id = 5
    assert stop_ids(hf_model, tiny_tokenizer()) == {0, 3, 4, 5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected auto, bfloat16, float16, float32, float64, got 'int8'"),
        ({"device": "gpu"}, "device: expected auto, cpu, cuda or cuda:<number>, got 'gpu'"),
        ({"device": "mps"}, "device: expected auto, cpu, cuda or cuda:<number>, got 'mps'"),
    ],
)
def test_unknown_dtype_or_device(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_hf(str(folder), **options)


def test_cuda_asked_for_but_absent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="has no usable GPU, got 'cuda'"):
        load_hf(str(folder), device="cuda")
    assert parse_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse_device("auto") == torch.device("cuda")
    with pytest.raises(UsageError, match="expected one of 1 GPUs, got 'cuda:3'"):
        parse_device("cuda:3")


def test_folder_without_a_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"which has no config\.json"):
        load_hf(str(tmp_path))
    with pytest.raises(UsageError, match="which does not exist"):
        load_hf(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="got the file"):
        load_hf(str(folder / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UsageError, match="no_such_model"):
        load_hf(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="could not be loaded"):
        load_hf(str(tmp_path))


def test_folder_without_weights_or_tokenizer(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="could not be loaded"):
        load_hf(str(tmp_path))
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="could not be loaded"):
        load_hf(str(tmp_path))


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files\nmore advice")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(UsageError, match=r"got 'someone/something', .* \(We couldn't connect to .* the files\)$"):
        load_hf("someone/something")


def test_draft_model_with_padded_logits(folder: Path, tmp_path: Path) -> None:
    target = load_hf(str(folder), device="cpu")
    draft = load_draft_hf(target, str(save(tmp_path, vocab_size=48, seed=1)))
    assert (draft.vocab_size, target.vocab_size) == (48, 40)
    assert tokenizer_difference(target.tokenizer, draft.tokenizer) is None


def test_draft_model_with_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    target = load_hf(str(folder), device="cpu")
    save(tmp_path, num_tokens=39)
    with pytest.raises(UsageError, match=r"40 tokens against 39, .* first id that differs is 39: 'B' against None"):
        load_draft_hf(target, str(tmp_path))
    with pytest.raises(UsageError, match="a TabularTokenizer cannot be compared with a HFTokenizer"):
        load_draft_hf(random_tabular(), str(folder))


def test_draft_model_on_another_device(folder: Path) -> None:
    target = SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(UsageError, match=r"draft_model.device: expected auto or that of the target, cuda:1, got 'cpu'"):
        load_draft_hf(target, str(folder), device="cpu")


def test_same_size_but_other_tokens() -> None:
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    difference = tokenizer_difference(HFTokenizer(tiny_tokenizer()), HFTokenizer(other))
    assert difference == "40 tokens against 40, and the first id that differs is 12: 'a' against 'b'"
    assert tokenizer_difference(HFTokenizer(tiny_tokenizer()), HFTokenizer(tiny_tokenizer())) is None


def test_checkpoint_that_lacks_weights(tmp_path: Path) -> None:
    hf_model = tiny_model("llama").hf_model
    hf_model.base_model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"in which 1 are missing: lm_head\.weight"):
        load_hf(str(tmp_path))
