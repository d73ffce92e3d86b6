"""Training draft heads: data, loss, loop, measurement, and the study around them."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from spectoolkit import config
from spectoolkit.composed_prompts import load_composed
from spectoolkit.errors import RunError, UsageError
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.eagle3_files import save_eagle3
from spectoolkit.models.eagle3_head import Eagle3Config
from spectoolkit.models.eagle3_start import fresh_head, head_config, trained_head, with_draft_ids
from spectoolkit.prompts import load_builtin
from spectoolkit.studies.train_draft_head import apart
from spectoolkit.training.data import Batch, Example, HiddenCache, batches, frequent_ids, hidden_of
from spectoolkit.training.evaluate import held_out, means
from spectoolkit.training.loop import Schedule, _losses, train
from spectoolkit.training.loss import draft_loss, is_counted
from tests.helpers.tiny_models import tiny_head, tiny_model

LAYERS = (0, 1, 3)
EXAMPLES = [
    Example(
        tuple((7 * i + 3 * j) % 38 + 2 for j in range(2 + i % 4)),
        tuple((5 * i + j * j) % 38 + 2 for j in range(9 - i % 3)),
    )
    for i in range(22)
]


@pytest.fixture(scope="module")
def target():
    return tiny_model().with_features(LAYERS)


def schedule(**changes) -> Schedule:
    return Schedule(
        **{
            "num_steps": 60,
            "num_warmup": 3,
            "learning_rate": 3e-3,
            "num_depths": 2,
            "depth_decay": 0.8,
            "temperatures": (0.5, 1.0),
            "acceptance_weight": 1.0,
            "acceptance_from": 0.3,
            "trains_output": False,
            "checkpoint_every": 20,
            "seed": 0,
            **changes,
        }
    )


def new_draft(target) -> Eagle3:
    shape = head_config(target, 30, LAYERS)
    return Eagle3(fresh_head(target, shape, frequent_ids(EXAMPLES, 30, 40), 0), target, "new")


def test_batches_hold_every_example_once():
    found = batches(EXAMPLES, 4, seed=1)
    seen = [
        Example(prompt, tuple(token for token in row if token >= 0))
        for batch in found
        for prompt, row in zip(batch.prompts, batch.tokens.tolist(), strict=True)
    ]
    assert sorted(seen, key=repr) == sorted(EXAMPLES, key=repr)
    assert all(len(batch.prompts) <= 4 for batch in found)
    assert [batch.examples for batch in found] == [batch.examples for batch in batches(EXAMPLES, 4, seed=1)]
    assert [batch.examples for batch in found] != [batch.examples for batch in batches(EXAMPLES, 4, seed=2)]


def test_frequent_ids_are_the_most_frequent():
    examples = [Example((1, 2), (5, 5, 5, 9, 9, 3)), Example((1, 2), (9, 7))]
    assert frequent_ids(examples, 2, 12).tolist() == [5, 9]
    assert frequent_ids(examples, 5, 12).tolist() == [0, 3, 5, 7, 9]


def test_losses_are_those_of_live_drafting(target):
    """Every position and depth by the live stream, one request at a time."""
    head = tiny_head(target, draft_vocab_size=30)
    batch = Batch.of(EXAMPLES[:6])
    output = target.hf_model.get_output_embeddings().weight[head.head.draft_ids].detach()
    found = _losses(head, batch, hidden_of(target, batch), output, 3, 0.8, 0.7)
    sums, counts = torch.zeros(3).double(), torch.zeros(3)
    for example in EXAMPLES[:6]:
        for s in range(len(example.output)):
            before = [*example.prompt, *example.output[:s]]
            state = target.prefill([before[:-1]])
            features = target.features(state, [len(before) - 1])
            logits, _ = target.score(state, torch.tensor([[before[-1], *example.output[s:]]]))
            target_probs = torch.softmax(logits[0][:, head.head.draft_ids] / 0.8, -1)
            draft_logits, stream = head.first(head.start([before], features))
            for depth in range(min(3, len(example.output) - s)):
                if depth:
                    token = example.output[s + depth - 1]
                    draft_logits, stream = head.next(stream, torch.tensor([[token]]))
                log_probs = torch.log_softmax(draft_logits[0, 0, head.head.draft_ids] / 0.8, -1)
                accepted = torch.minimum(target_probs[depth], log_probs.exp()).sum()
                sums[depth] -= (target_probs[depth] * log_probs).sum() + 0.7 * accepted.log()
                counts[depth] += 1
    torch.testing.assert_close(found.double(), sums / counts, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_loss_is_that_of_its_formula():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=generator).requires_grad_()
    target_probs, scale = torch.softmax(2 * torch.randn(6, 9, generator=generator), -1), torch.arange(6)
    for weight in (0.0, 0.7):
        (draft_loss(logits, target_probs, weight) * scale).sum().backward()
        found, logits.grad = logits.grad, None
        log_probs = torch.log_softmax(logits, -1)
        accepted = torch.minimum(log_probs.exp(), target_probs).sum(-1)
        formula = -(target_probs * log_probs).sum(-1) - weight * accepted.log()
        torch.testing.assert_close(draft_loss(logits, target_probs, weight), formula)
        (formula * scale).sum().backward()
        torch.testing.assert_close(found, logits.grad)
        logits.grad = None


def test_training_lowers_the_loss_and_an_interrupted_one_goes_on_where_it_was(target, tmp_path):
    fed = batches(EXAMPLES, 4, seed=0)
    hidden = HiddenCache(target, tmp_path / "features", 10**9)

    def evaluate():
        return {"overlap_1": 0.5}

    whole = new_draft(target)
    log = train(whole, target, fed, hidden, schedule(), tmp_path / "a.pt", {"x": 1}, evaluate)
    losses = [row["loss_1"] for row in log if "loss_1" in row]
    assert losses[2] < losses[1] - 0.1  # the first is of another loss
    assert [row["step"] for row in log] == [0, 20, 40, 60]

    class Killed(Exception):
        pass

    class KillingCache(HiddenCache):
        left = 33

        def get(self, batch):
            self.left -= 1
            if self.left == 0:
                raise Killed
            return super().get(batch)

    killed, killing = new_draft(target), KillingCache(target, tmp_path / "features", 10**9)
    with pytest.raises(Killed):
        train(killed, target, fed, killing, schedule(), tmp_path / "b.pt", {"x": 1}, evaluate)
    resumed = new_draft(target)
    log_resumed = train(resumed, target, fed, hidden, schedule(), tmp_path / "b.pt", {"x": 1}, evaluate)
    for name, tensor in whole.head.state_dict().items():
        torch.testing.assert_close(resumed.head.state_dict()[name], tensor, rtol=0, atol=0)
    drop = ["seconds"]
    pd.testing.assert_frame_equal(pd.DataFrame(log).drop(columns=drop), pd.DataFrame(log_resumed).drop(columns=drop))
    with pytest.raises(UsageError, match="training with another x"):
        train(new_draft(target), target, fed, hidden, schedule(), tmp_path / "b.pt", {"x": 2}, evaluate)
    assert torch.equal(whole.head.lm_head.weight, new_draft(target).head.lm_head.weight)
    trained = new_draft(target)
    train(trained, target, fed, hidden, schedule(trains_output=True, num_steps=2), tmp_path / "c.pt", {}, evaluate)
    assert not torch.equal(trained.head.lm_head.weight, whole.head.lm_head.weight)


def test_hidden_states_are_kept_within_the_budget(target, tmp_path, monkeypatch):
    fed = batches(EXAMPLES, 4, seed=0)
    one = hidden_of(target, fed[0])
    size = sum(getattr(one, name).nbytes for name in ("of_prompts", "of_inputs", "last"))
    cache = HiddenCache(target, tmp_path / "some", int(2.5 * size))
    for batch in fed:
        for name in ("of_prompts", "of_inputs", "last"):
            torch.testing.assert_close(getattr(cache.get(batch), name), getattr(hidden_of(target, batch), name))
            torch.testing.assert_close(getattr(cache.get(batch), name), getattr(hidden_of(target, batch), name))
    used = sum(file.stat().st_size for file in (tmp_path / "some").iterdir())
    assert size < used < 3 * size
    with pytest.raises(RunError, match=r"feature_cache_gb allows, got"):
        HiddenCache(target, tmp_path / "all", 10**18)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spectoolkit.training.data.save_file", full_disk)
    with pytest.raises(RunError, match="No space left"):
        HiddenCache(target, tmp_path / "full", 10**9).get(fed[0])
    assert list((tmp_path / "full").iterdir()) == []


def test_held_out_numbers_are_those_of_the_rows(target):
    head = tiny_head(target, draft_vocab_size=30)
    frame = held_out(head, target, [Batch.of(EXAMPLES[:3]), Batch.of(EXAMPLES[3:5])], 0.7, 2)
    assert frame["example"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    for depth in (1, 2):
        for i, example in enumerate(EXAMPLES[:5]):
            overlaps, agreements, accepted = 0.0, 0, 0.0
            for s in range(len(example.output) - depth + 1):
                before = [*example.prompt, *example.output[:s]]
                state = target.prefill([before[:-1]])
                features = target.features(state, [len(before) - 1])
                logits, _ = target.score(state, torch.tensor([[before[-1], *example.output[s:]]]))
                draft_logits, stream = head.first(head.start([before], features))
                if depth == 2:
                    draft_logits, _ = head.next(stream, torch.tensor([[example.output[s]]]))
                p, q = (torch.softmax(x / 0.7, -1) for x in (logits[0, depth - 1], draft_logits[0, 0]))
                overlaps += float(torch.minimum(p, q).sum())
                agreements += int(p.argmax() == q.argmax())
                accepted += float(p[q.argmax()])
            row = frame[(frame["example"] == i) & (frame["depth"] == depth)].iloc[0]
            assert row["tokens"] == len(example.output) - depth + 1
            assert row["overlap"] == pytest.approx(overlaps, rel=1e-4)
            assert row["agreement"] == agreements
            assert row["argmax_acceptance"] == pytest.approx(accepted, rel=1e-4)
    found = means(frame, ["a", "a", "b", "c", "d"])
    first = frame[frame["depth"] == 1]
    assert found["overlap"][0] == pytest.approx(first["overlap"].sum() / first["tokens"].sum())
    assert (found["overlap_low"] <= found["overlap"]).all()
    assert (found["overlap_high"] >= found["overlap"]).all()


def test_counted_positions():
    tokens = torch.tensor([[4, 5, 6], [4, -1, -1]])
    assert is_counted(tokens, 0).tolist() == [[True] * 3, [True, False, False]]
    assert is_counted(tokens, 2).tolist() == [[False, False, True], [False] * 3]


def test_a_fresh_head_begins_as_the_targets_last_layer(target):
    head = new_draft(target).head
    last = target.hf_model.model.layers[-1]
    torch.testing.assert_close(head.layer.mlp.up_proj.weight, last.mlp.up_proj.weight.float())
    torch.testing.assert_close(head.layer.self_attn.q_proj.weight[:, 32:], last.self_attn.q_proj.weight.float())
    rows = target.hf_model.get_output_embeddings().weight[head.draft_ids]
    torch.testing.assert_close(head.lm_head.weight, rows.float())
    with pytest.raises(UsageError, match="draft_vocab_size: expected a number from 1 to the target's 40, got 41"):
        head_config(target, 41, LAYERS)
    with pytest.raises(UsageError, match="six layers or more"):
        head_config(target, 30)
    assert isinstance(head_config(tiny_model("gpt2", layers=8), 30), Eagle3Config)


def test_text_that_shares_a_passage_with_a_held_out_prompt_is_left_out():
    held = [(1, 2, *range(100, 120)), (1, 2, *range(200, 220)), (1, 2, 300)]
    plain = Example((1, 2, *range(400, 420)), tuple(range(20)))
    near = Example((1, 2, *range(400, 420)), tuple(range(105, 116)))  # 11 tokens
    across = Example((1, 2, 7, *range(105, 110)), tuple(range(110, 117)))  # 12 of prompt and output together
    written = Example((1, 2), (7, *range(205, 217), 7))
    assert apart([plain, near], held) == ([plain, near], 0)
    assert apart([across, plain, written, near], held) == ([plain, near], 2)
    for prompt in [(1, 2, *range(105, 117), 7), (1, 2, 300), held[0]]:
        with pytest.raises(UsageError, match="got 1 that share 12 consecutive tokens"):
            apart([plain, Example(prompt, (3, 4)), Example(prompt, (5,))], held)


def test_composed_prompts_are_many_different_and_no_prompts_of_another_set():
    prompts = load_composed(3000, seed=3)
    texts = [" / ".join(message.content for message in prompt.messages) for prompt in prompts]
    assert len(set(texts)) == 3000
    assert not any("{" in text and "}" in text and "{topic" in text for text in texts)
    assert prompts[:50] == load_composed(50, seed=3)
    assert texts[:50] != [" / ".join(m.content for m in p.messages) for p in load_composed(50, seed=4)]
    words = [text.split() for text in texts]
    runs = {tuple(some[i : i + 8]) for some in words for i in range(len(some) - 7)}
    for prompt in load_builtin():
        for message in prompt.messages:
            some = message.content.split()
            assert not any(tuple(some[i : i + 8]) in runs for i in range(len(some) - 7)), prompt.id
    with pytest.raises(UsageError, match=r"prompts.limit: expected an integer from 1 to 100000, got 0"):
        load_composed(0)


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model(vocab_size=100, layers=8)
    model.hf_model.float().save_pretrained(folder)
    model.tokenizer.hf_tokenizer.save_pretrained(folder)
    return folder


def overrides(saved_target: Path, folder: Path, *more: str) -> list[str]:
    return [
        "experiment=train_draft_head",
        "target=hf",
        f"target.model={saved_target}",
        f"folder={folder}",
        "max_new_tokens=10",
        "samples_per_prompt=1",
        "cases=[{prompts: composed, prompts.limit: 6, prompts.seed: 9, sampling.temperature: 0.8},"
        "{prompts: builtin, prompts.limit: 4, sampling.temperature: 0.7}]",
        "study.num_steps=4",
        "study.checkpoint_every=2",
        "study.examples_per_step=3",
        "study.draft_vocab_size=50",
        "study.feature_cache_gb=0.01",
        *more,
    ]


@pytest.fixture(scope="module")
def trained(saved_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    long_context = saved_target / "config.json"
    settings = json.loads(long_context.read_text()) | {"max_position_embeddings": 2000}
    long_context.write_text(json.dumps(settings))
    text = config.plan(overrides(saved_target, folder)).run()
    assert "of which none shares 12 consecutive tokens with the training text" in text
    return folder


def test_the_study_writes_a_head_that_drafts(saved_target, trained, tmp_path):
    for name in ("log.csv", "held_out.csv", "figure.png", "figure.pdf", "table.md", "manifest.json"):
        assert (trained / name).stat().st_size > 0
    log = pd.read_csv(trained / "log.csv")
    assert log["step"].tolist() == [0, 4]
    assert pd.read_csv(trained / "held_out.csv")["depth"].tolist() == [1, 2, 3, 4]
    text = config.plan(
        [
            "target=hf",
            f"target.model={saved_target}",
            "draft_model=eagle3",
            f"draft_model.model={trained / 'head'}",
            "prompts.limit=4",
            "max_new_tokens=8",
            f"folder={tmp_path}",
            "+grid.engine=[live,replay]",
            "+grid.drafter=[argmax,same_temperature]",
        ]
    ).run()
    assert "argmax" in text


def test_other_draft_ids_leave_the_states_alone(target):
    draft = new_draft(target)
    other = with_draft_ids(draft.head, target, torch.arange(0, 40, 2))
    assert other.draft_ids.tolist() == list(range(0, 40, 2))
    states = torch.randn(3, 32)
    both = [i for i in range(0, 40, 2) if draft.head.t2d[i]]
    before = Eagle3(draft.head, target, "x").wide_logits(states[None])[..., both]
    torch.testing.assert_close(Eagle3(other, target, "x").wide_logits(states[None])[..., both], before)
    with torch.no_grad():
        draft.head.lm_head.weight[0] += 1
    with pytest.raises(UsageError, match="whose output layer was not trained"):
        with_draft_ids(draft.head, target, torch.arange(5))


def test_a_trained_head_can_be_gone_on_with(saved_target, trained, tmp_path):
    begin = f"study.start={trained / 'head_without_output'}"
    text = config.plan(overrides(saved_target, tmp_path, begin, "study.learning_rate=1e-9")).run()
    assert "the head head_without_output (" in text
    first, second = (load_file(folder / "head" / "model.safetensors") for folder in (trained, tmp_path))
    for name in first:
        torch.testing.assert_close(first[name], second[name])
    config.plan(overrides(saved_target, tmp_path / "fresh", "study.learning_rate=1e-9")).run()
    fresh = load_file(tmp_path / "fresh" / "head" / "model.safetensors")
    assert not torch.allclose(first["fc.weight"], fresh["fc.weight"], rtol=1e-2)
    with pytest.raises(UsageError, match=r"study.feature_layers: expected null or the layers \[2, 4, 5\]"):
        config.plan(overrides(saved_target, tmp_path, begin, "study.feature_layers=[0,1,2]")).run()
    with pytest.raises(UsageError, match="expected a folder or hub repository"):
        config.plan(overrides(saved_target, tmp_path, "study.start=/nowhere")).run()


def test_a_head_with_an_output_layer_of_its_own_keeps_its_ids(target, tmp_path):
    draft = new_draft(target)
    with torch.no_grad():
        draft.head.lm_head.weight[3] += 1
    save_eagle3(draft.head, tmp_path / "own", "tiny", "X", 2, torch.float16)
    again = trained_head(target, str(tmp_path / "own"), torch.arange(10, 40))
    assert torch.equal(again.draft_ids, draft.head.draft_ids)
    with pytest.raises(UsageError, match=r"expected the 30 ids of the trained output layer of .*, got 20"):
        trained_head(target, str(tmp_path / "own"), torch.arange(20))
    save_eagle3(new_draft(target).head, tmp_path / "plain", "tiny", "X", 2, torch.float16)
    assert trained_head(target, str(tmp_path / "plain"), torch.arange(20)).draft_ids.tolist() == list(range(20))


def test_a_finished_study_trains_no_more(saved_target, trained, monkeypatch):
    def no_training(*_):
        raise AssertionError("a finished head was trained again")

    monkeypatch.setattr("spectoolkit.training.loop._losses", no_training)
    before = (trained / "held_out.csv").read_bytes()
    config.plan(overrides(saved_target, trained)).run()
    assert (trained / "held_out.csv").read_bytes() == before


def test_other_settings_do_not_meet_the_checkpoint(saved_target, trained):
    with pytest.raises(UsageError, match="checkpoint of a training with another learning_rate"):
        config.plan(overrides(saved_target, trained, "study.learning_rate=0.5")).run()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["study.held_out_prompts=jsonl"], "one cell with prompts=jsonl and others"),
        (["study.num_steps=0"], "study.num_steps: expected an integer >= 1, got 0"),
        (["study.temperatures=[0.5,0]"], r"study.temperatures: expected numbers > 0, got \[0.5, 0.0\]"),
        (["study.depth_decay=0"], "0 < depth_decay <= 1"),
        (["study.acceptance_from=2"], r"acceptance_from in \[0, 1\], got 1.0 and 2"),
        (["study.draft_vocab_size=1000"], "draft_vocab_size: expected a number from 1 to the target's 100, got 1000"),
        (["study.written_vocab_size=101"], r"study.written_vocab_size: expected null, or a number from 1 to 100"),
        (["study.feature_layers=[1,2,30]"], "expected layers from 0 to 8"),
        (["target=tabular", "~target.model"], "expected a target of transformers"),
    ],
)
def test_settings_that_do_not_fit_are_named(saved_target, tmp_path, more, message):
    asked = [
        x for x in overrides(saved_target, tmp_path) if not (more[0] == "target=tabular" and x.startswith("target"))
    ]
    with pytest.raises(UsageError, match=message):
        config.plan([*asked, *[x for x in more if not x.startswith("~")]]).run()
