"""Draft heads on disk: both public layouts, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectoolkit.errors import RunError, UsageError
from spectoolkit.models.eagle3_files import load_eagle3, save_eagle3
from tests.helpers.tiny_models import tiny_head, tiny_model

# Wide enough that a published head's default layers (2, L / 2, L - 3) differ.
LAYERS = 8


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def target(request):
    model = tiny_model(request.param, layers=LAYERS)
    model.name = "tiny"
    return model


def head_for(target, **options):
    head = tiny_head(target, feature_layers=(2, 4, 5), **options)
    return head


def states_of(draft) -> torch.Tensor:
    features = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)).double()
    state = draft.start([(1, 2, 3, 4, 5, 6), (7, 8)], features)
    first, state = draft.first(state)
    second, _ = draft.next(state, torch.tensor([[9], [3]]))
    return torch.cat([first, second], 1)


@pytest.fixture
def folder(target, tmp_path):
    head = head_for(target)
    save_eagle3(head.head, tmp_path / "head", target.name, "TinyForCausalLM", 3, torch.float64)
    return tmp_path / "head"


def edit(folder, change_config=None, change_tensors=None) -> None:
    """Rewrite the files of a head."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if change_config:
        change_config(config)
    if change_tensors:
        change_tensors(tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def original_layout(folder, suffix: str) -> None:
    """The same head as the first EAGLE-3 checkpoints were laid out."""
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    rope = layer.pop("rope_parameters")
    layer["rope_theta"] = rope["rope_theta"]
    layer |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["draft_vocab_size"]}
    (folder / "config.json").write_text(json.dumps(layer))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    (folder / "model.safetensors").unlink()
    if suffix == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}])
def test_what_is_saved_is_loaded(target, tmp_path, options):
    head = head_for(target, **options)
    save_eagle3(head.head, tmp_path / "head", "tiny", "TinyForCausalLM", 3, torch.float64)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    loaded = load_eagle3(target, str(tmp_path / "head"))
    assert loaded.feature_layers == (2, 4, 5)
    torch.testing.assert_close(states_of(loaded), states_of(head), rtol=0, atol=0)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_the_original_layout_is_loaded(target, folder, suffix):
    original_layout(folder, suffix)
    loaded = load_eagle3(target, str(folder))
    assert loaded.feature_layers == (2, 4, 5)
    torch.testing.assert_close(states_of(loaded), states_of(head_for(target)), rtol=0, atol=0)


def test_a_head_without_output_rows_takes_the_targets(target, tmp_path):
    head = head_for(target)
    rows = target.hf_model.get_output_embeddings().weight
    with torch.no_grad():
        head.head.lm_head.weight.copy_(rows[head.head.draft_ids])
    save_eagle3(head.head, tmp_path / "head", "tiny", "T", 3, torch.float64, with_output=False)
    assert "lm_head.weight" not in load_file(tmp_path / "head" / "model.safetensors")
    loaded = load_eagle3(target, str(tmp_path / "head"))
    torch.testing.assert_close(states_of(loaded), states_of(head), rtol=0, atol=0)


def test_a_whole_vocabulary_needs_no_map(target, tmp_path):
    head = head_for(target, draft_vocab_size=40)
    save_eagle3(head.head, tmp_path / "head", "tiny", "T", 3, torch.float64)

    def drop_maps(tensors):
        del tensors["d2t"], tensors["t2d"]

    edit(tmp_path / "head", change_tensors=drop_maps)
    torch.testing.assert_close(states_of(load_eagle3(target, str(tmp_path / "head"))), states_of(head), rtol=0, atol=0)


def test_own_embeddings_are_used(target, folder):
    own = torch.randn(40, 32, generator=torch.Generator().manual_seed(2)).double()
    edit(folder, change_tensors=lambda tensors: tensors.update({"embed_tokens.weight": own}))
    loaded = load_eagle3(target, str(folder))
    assert not torch.allclose(states_of(loaded), states_of(head_for(target)))
    torch.testing.assert_close(loaded.embed(torch.tensor([[3]]))[0, 0], own[3])


REFUSED = {
    "missing": (None, lambda t: t.pop("fc.weight"), r"missing fc.weight \[32, 96\]"),
    "missing map": (None, lambda t: t.pop("d2t"), "missing d2t"),
    "unexpected": (None, lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(1)}), "unexpected layers.1"),
    "shape": (None, lambda t: t.update({"norm.weight": torch.ones(31)}), r"norm.weight: expected shape \[32\], got"),
    "nan": (None, lambda t: t["fc.weight"].fill_(torch.nan), "fc.weight holds NaN"),
    "ids twice": (None, lambda t: t["d2t"].sub_(torch.arange(25)), "25 different ids below 40"),
    "ids too large": (None, lambda t: t["d2t"].add_(40), "25 different ids below 40"),
    "maps": (None, lambda t: t.update(t2d=~t["t2d"]), "d2t and t2d of .* contradict"),
    "width": (
        lambda c: c.update(target_hidden_size=64),
        None,
        "another target: its hidden size is 64, that of tiny 32",
    ),
    "vocabulary": (
        lambda c: c["transformer_layer_config"].update(vocab_size=50),
        None,
        "another target: its vocabulary is 50, that of tiny 40",
    ),
    "layers": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        None,
        r"reads the target's layers \[2, 4, 9\], and tiny has 8",
    ),
    "kind": (lambda c: c.update(speculators_model_type="mlp"), None, "expected an EAGLE-3 head .*'mlp'"),
    "whole model": (lambda c: c["transformer_layer_config"].update(num_hidden_layers=8), None, "is this a whole model"),
    "sizes": (lambda c: c["transformer_layer_config"].pop("hidden_size"), None, "lacks hidden_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(target, folder, name):
    change_config, change_tensors, message = REFUSED[name]
    edit(folder, change_config, change_tensors)
    with pytest.raises(UsageError, match=message):
        load_eagle3(target, str(folder))


def test_broken_and_absent_files_are_named(target, folder, tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_eagle3(target, str(tmp_path / "nothing"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"model.safetensors of .* cannot be read"):
        load_eagle3(target, str(folder))
    file.unlink()
    with pytest.raises(UsageError, match=r"expected model.safetensors or pytorch_model.bin"):
        load_eagle3(target, str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"expected a config.json"):
        load_eagle3(target, str(folder))


def test_a_failed_save_leaves_the_old_head(target, folder, monkeypatch):
    before = states_of(load_eagle3(target, str(folder)))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spectoolkit.models.eagle3_files.save_file", full_disk)
    with pytest.raises(RunError, match="No space left on device"):
        save_eagle3(head_for(target).head, folder, "tiny", "T", 3, torch.float64)
    torch.testing.assert_close(states_of(load_eagle3(target, str(folder))), before, rtol=0, atol=0)
    assert [path.name for path in folder.parent.iterdir()] == ["head"]
    shutil.rmtree(folder)
