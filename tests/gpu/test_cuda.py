"""The same results on a GPU as on a CPU. Run where there is one: `make gpu-check`."""

import pytest
import torch

from spectoolkit.datatypes import SamplingParams
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NGramDrafter
from spectoolkit.functional.draw import draw
from spectoolkit.functional.noise import Role, uniforms
from spectoolkit.functional.warp import warp
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.eagle3_start import fresh_head, head_config
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.replay import Strategy, replay
from spectoolkit.training.data import Example, HiddenCache, batches, frequent_ids
from spectoolkit.training.evaluate import held_out
from spectoolkit.training.loop import Schedule, train
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Block, Coupled, Match, Rejection, Typical
from tests.helpers.tiny_models import FAMILIES, tiny_head, tiny_model
from tests.helpers.toys import outcome, requests, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=7, min_p=0.01),
]
PAIRS = {
    "argmax rejection": (lambda model: ModelDrafter(model, 40, constant=0.0), Rejection()),
    "same_temperature rejection": (lambda model: ModelDrafter(model, 40, ratio=1.0), Rejection()),
    "same_temperature block": (lambda model: ModelDrafter(model, 40, ratio=1.0), Block()),
    "same_temperature typical": (lambda model: ModelDrafter(model, 40, ratio=1.0), Typical()),
    "coupled coupled": (lambda model: CoupledDrafter(model, 40, ratio=1.0), Coupled()),
    "ngram match": (lambda model: NGramDrafter(2, 1), Match()),
}


def on_gpu(model: CausalLM) -> CausalLM:
    return CausalLM(model.hf_model.cuda(), model.tokenizer, model.name)


def test_noise_is_the_same_to_the_last_bit():
    arguments = [torch.tensor([3, 2**40]), torch.tensor([-5, 77]), torch.tensor([0, 9])]
    for role in Role:
        on_cpu = uniforms(*arguments, 50, role)
        assert torch.equal(uniforms(*[a.cuda() for a in arguments], 50, role).cpu(), on_cpu)


def test_warped_rows_and_draws():
    logits = 4 * torch.randn(3, 5, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings = [torch.tensor([0.7, 0.0, 1.0]), torch.tensor([0, 0, 50]), torch.tensor([0.9, 1.0, 1.0])]
    settings = [s.double() if s.is_floating_point() else s for s in settings]
    probs = warp(logits, *settings, None)
    on_gpu_probs = warp(logits.cuda(), *[s.cuda() for s in settings], None)
    torch.testing.assert_close(on_gpu_probs.cpu(), probs, rtol=1e-12, atol=1e-15)
    noise = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(on_gpu_probs, noise.cuda()).cpu(), draw(probs, noise))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_decoding_gives_the_tokens_of_the_cpu(family, pair):
    make, verifier = PAIRS[pair]
    asked = requests(7, max_new_tokens=15, vocab_size=40, params=PARAMS)
    target = tiny_model(family)
    expected = run(target, make(skip_layers(target, [1])), verifier, asked)
    target = on_gpu(tiny_model(family))
    found = run(target, make(skip_layers(target, [1])), verifier, asked)
    assert {key: outcome(one) for key, one in found.items()} == {key: outcome(one) for key, one in expected.items()}


@pytest.mark.parametrize("pair", ["argmax rejection", "same_temperature block", "coupled coupled"])
def test_kernels_give_the_tokens_of_the_reference(pair, monkeypatch):
    make, verifier = PAIRS[pair]
    params = [SamplingParams(temperature=t) for t in (0.8, 0.0, 1.3)]
    asked = requests(7, max_new_tokens=15, vocab_size=40, params=params)
    target = tiny_model()
    target = on_gpu(CausalLM(target.hf_model.float(), target.tokenizer, target.name))
    found = []
    for switch in ("auto", "off"):
        monkeypatch.setenv("SPECTOOLKIT_KERNELS", switch)
        done = run(target, make(skip_layers(target, [1])), verifier, asked)
        found.append({key: outcome(one) for key, one in done.items()})
    assert found[0] == found[1]


def test_replay_gives_the_counts_of_the_cpu():
    asked = requests(7, max_new_tokens=15, vocab_size=40, params=PARAMS)
    counts = []
    for target in (tiny_model(), on_gpu(tiny_model())):
        draft = skip_layers(target, [1])
        strategies = [
            Strategy(ModelDrafter(draft, 40, ratio=1.0), Block(), 4),
            Strategy(CoupledDrafter(draft, 40, ratio=1.0), Coupled(), 4),
            Strategy(NGramDrafter(2, 1), Rejection(), 4),
        ]
        if not counts:
            done = run(target, strategies[2].drafter, Rejection(), asked)
            outputs = Trajectories(tuple(asked), tuple(done[r.id].tokens for r in asked), ("length",) * len(asked))
        counts.append(replay(target, strategies, outputs))
    for one, other in zip(*counts, strict=True):
        torch.testing.assert_close(one[3].accepted_at, other[3].accepted_at, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_draft_head_drafts_and_replays_as_on_the_cpu(family):
    asked = requests(7, max_new_tokens=15, vocab_size=40, params=PARAMS)
    found, counts = [], []
    for plain in (tiny_model(family), on_gpu(tiny_model(family))):
        target = plain.with_features((0, 1, 3))
        head = tiny_head(target)
        head.head.to(target.device)
        drafter = ModelDrafter(head, 40, ratio=1.0)
        done = run(target, drafter, Block(), asked)
        found.append({key: outcome(one) for key, one in done.items()})
        outputs = Trajectories(tuple(asked), tuple(done[r.id].tokens for r in asked), ("length",) * len(asked))
        counts.append(replay(target, [Strategy(drafter, Rejection(), 4)], outputs)[0])
    assert found[0] == found[1]
    # Rotary frequencies are kept in float32.
    torch.testing.assert_close(counts[0][3].accepted_at, counts[1][3].accepted_at, rtol=1e-4, atol=1e-4)


def test_a_draft_head_is_trained(tmp_path):
    target = on_gpu(tiny_model()).with_features((0, 1, 3))
    examples = [Example((1, 2, 3 + i), tuple((i * j + 2) % 40 for j in range(9))) for i in range(12)]
    shape = head_config(target, 30, (0, 1, 3))
    draft = Eagle3(fresh_head(target, shape, frequent_ids(examples, 30, 40), 0), target, "new")
    fed = batches(examples, 4, seed=0)
    schedule = Schedule(40, 3, 3e-3, 2, 0.8, 0.0, 0.0, trains_output=False, checkpoint_every=20, seed=0)
    hidden = HiddenCache(target, tmp_path / "features", 10**8)

    def evaluate() -> dict[str, float]:
        return {"overlap_1": float(held_out(draft, target, fed[:1], 0.7, 2)["overlap"].sum())}

    log = train(draft, target, fed, hidden, schedule, tmp_path / "checkpoint.pt", {}, evaluate)
    assert log[-1]["loss_1"] < log[1]["loss_1"]
