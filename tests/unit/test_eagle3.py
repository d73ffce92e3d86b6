"""The draft head: against a plain forward of its equations, live against unrolled, inside the loop and in replay."""

import dataclasses

import pytest
import torch

from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NoDrafter, TopMDrafter
from spectoolkit.errors import UsageError
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.prefix_cache import PrefixCache
from spectoolkit.replay import BATCH, Strategy, replay
from spectoolkit.sampling import SamplingState
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Block, Coupled, Rejection
from tests.helpers.tiny_models import tiny_head, tiny_model
from tests.helpers.toys import outcome, run

PROMPTS = [(5, 9, 3, 7, 2), (8, 4), (6,)]
LAYERS = (0, 1, 3)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny_model().with_features(LAYERS)


@pytest.fixture(scope="module")
def head(target) -> Eagle3:
    return tiny_head(target)


def plain_states(head: Eagle3, tokens: list[int], features: torch.Tensor, num_own: int) -> torch.Tensor:
    """The head's states over a sequence of pairs, the last `num_own` of which hold its own states: one at a time."""
    net, layer = head.head, head.head.layer
    config = net.config.layer
    size = config.hidden_size // config.num_attention_heads
    groups = config.num_attention_heads // config.num_key_value_heads
    keys, values, states = [], [], []
    for n, token in enumerate(tokens):
        is_own = n >= len(tokens) - num_own
        given = states[-1] if is_own else net.fc(features[n])
        pair = torch.cat([layer.input_layernorm(head.embed(torch.tensor([token])))[0], layer.hidden_norm(given)])
        angles = n / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
        cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)

        def rotate(x, cos=cos, sin=sin):
            return x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

        queries = rotate(layer.self_attn.q_proj(pair).view(-1, size))
        keys.append(rotate(layer.self_attn.k_proj(pair).view(-1, size)))
        values.append(layer.self_attn.v_proj(pair).view(-1, size))
        out = []
        for h, query in enumerate(queries):
            scores = torch.stack([key[h // groups] for key in keys]) @ query / size**0.5
            out.append(scores.softmax(0) @ torch.stack([value[h // groups] for value in values]))
        residual = layer.hidden_norm(given) if net.config.norm_before_residual else given
        hidden = residual + layer.self_attn.o_proj(torch.cat(out))
        states.append(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
    return torch.stack(states)


def features_of(target: CausalLM, tokens: list[int]) -> torch.Tensor:
    """[T, F] by a plain forward without a cache."""
    hidden = target.hf_model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    raw = []
    for layer in LAYERS:
        taken = {}
        module = target.hf_model.model.layers[min(layer, 2)]
        if layer < 3:
            raw.append(hidden[layer][0])
        else:
            handle = module.register_forward_hook(lambda m, a, out, taken=taken: taken.update(x=out))
            target.hf_model(input_ids=torch.tensor([tokens]), use_cache=False)
            handle.remove()
            raw.append((taken["x"][0] if isinstance(taken["x"], tuple) else taken["x"])[0])
    return torch.cat(raw, -1)


@torch.inference_mode()
def test_features_follow_prefill_score_and_rollback(target):
    state = target.prefill([prompt[:-1] for prompt in PROMPTS])
    _, state = target.score(state, torch.tensor([[2, 11, 12], [4, 13, 14], [6, 15, 16]]))
    state = target.rollback(state, [6, 3, 1])
    found = target.features(state, [3, 2, 1])
    for b, (tokens, num) in enumerate([([5, 9, 3, 7, 2, 11], 3), ([8, 4, 13], 2), ([6], 1)]):
        torch.testing.assert_close(found[b, :num], features_of(target, tokens)[-num:])
    assert target.features(target.prefill([()]), [0]).shape == (1, 0, 96)


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}])
@torch.inference_mode()
def test_live_and_unrolled_states_are_those_of_the_equations(target, options):
    head = tiny_head(target, **options)
    outputs = [(10, 11, 12, 13, 14), (20, 21, 22, 23, 24), (30, 31, 32, 33, 34)]
    sequences = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    state = target.prefill([prompt[:-1] for prompt in PROMPTS])
    prompt_features = target.features(state, [4, 1, 0])
    _, state = target.score(
        state, torch.tensor([[prompt[-1], *o[:-1]] for prompt, o in zip(PROMPTS, outputs, strict=True)])
    )
    scored = target.features(state, [5, 5, 5])
    before = torch.stack([prompt_features[0, 3], prompt_features[1, 0], torch.zeros(96).double()])[:, None]
    features = torch.cat([before, scored[:, :-1]], 1)
    inputs = torch.tensor([[prompt[-1], *o[:-1]] for prompt, o in zip(PROMPTS, outputs, strict=True)])
    past, whole = head.unroll_start(PROMPTS, prompt_features), []
    for begin, end in [(0, 2), (2, 5)]:
        states, past = head.unroll(past, inputs[:, begin:end], features[:, begin:end], 3)
        whole.append(states)
    unrolled = [torch.cat([part[depth] for part in whole], 1) for depth in range(3)]
    for b, sequence in enumerate(sequences):
        size = len(PROMPTS[b])
        all_features = features_of(target, sequence)
        for depth in range(3):
            for n in range(depth, 5):
                tokens = sequence[1 : size + n] or sequence[:1]
                pairs = all_features[: len(tokens)] if size > 1 else torch.cat([0 * all_features[:1], all_features])
                tokens = tokens if size > 1 else sequence[: size + n]
                if options.get("norm_before_fc"):
                    pairs = head.head.input_norm(pairs)
                expected = plain_states(head, list(tokens), pairs, depth)[-1]
                torch.testing.assert_close(unrolled[depth][b, n], expected, rtol=1e-4, atol=1e-5)
    # Live: three drafts from start 0, of which two are committed and a third token, then two more from start 3.
    live = head.start(PROMPTS, prompt_features)
    found = []
    for step, (start, num) in enumerate([(0, 3), (3, 2)]):
        if step == 1:
            emitted = [output[:3] for output in outputs]
            live = head.commit(live, emitted, scored[:, :3])
        logits, live = head.first(live)
        found.append((start, 0, logits))
        for depth in range(1, num):
            logits, live = head.next(live, torch.tensor([[output[start + depth - 1]] for output in outputs]))
            found.append((start, depth, logits))
    for start, depth, logits in found:
        torch.testing.assert_close(logits[:, 0], head.wide_logits(unrolled[depth][:, start + depth]))


PARAMS = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2)


def asked(num: int, params: SamplingParams = PARAMS, max_new_tokens: int = 11) -> list[Request]:
    return [
        Request(
            f"r{i}", PROMPTS[i % 3] + (i % 7 + 2,) * (i % 4), max_new_tokens, params, seed=i, stop_ids=frozenset({0})
        )
        for i in range(num)
    ]


def drafters_of(head: Eagle3) -> dict:
    return {
        "argmax": (ModelDrafter(head, 40, constant=0.0), Rejection()),
        "sampled": (ModelDrafter(head, 40, ratio=1.0), Rejection()),
        "block": (ModelDrafter(head, 40, ratio=0.8), Block()),
        "top_m": (TopMDrafter(head, 40, ratio=1.0, keep=3), Rejection()),
        "coupled": (CoupledDrafter(head, 40, ratio=1.0), Coupled()),
    }


@pytest.mark.parametrize("name", drafters_of(None))
def test_greedy_output_is_plain_greedy_output(target, head, name):
    drafter, verifier = drafters_of(head)[name]
    requests = asked(9, SamplingParams(temperature=0.0, repetition_penalty=1.3))
    plain = run(target, NoDrafter(), Rejection(), requests)
    found = run(target, drafter, verifier, requests)
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in plain.items()}
    assert sum(step.accepted for one in found.values() for step in one.steps) > 0


@pytest.mark.parametrize("name", drafters_of(None))
def test_a_request_does_not_depend_on_its_batch(target, head, name):
    drafter, verifier = drafters_of(head)[name]
    requests = asked(7)
    alone = run(target, drafter, verifier, requests, batch_size=1)
    for wide in (run(PrefixCache(target, 100), drafter, verifier, requests, batch_size=b) for b in (3, 7)):
        assert {key: outcome(one) for key, one in wide.items()} == {key: outcome(one) for key, one in alone.items()}


def test_replay_asks_of_each_start_and_depth_what_live_drafting_would(target, head):
    """The numbers behind a replay, one step start at a time by the live stream."""
    requests = asked(BATCH + 5, max_new_tokens=9)
    outputs = run(target, NoDrafter(), Rejection(), requests)
    texts = Trajectories(
        tuple(requests),
        tuple(outputs[r.id].tokens for r in requests),
        tuple(outputs[r.id].finish_reason for r in requests),
    )
    drafter, k = ModelDrafter(head, 40, ratio=1.0), 3
    counts = replay(target, [Strategy(drafter, Rejection(), k)], texts)[0]
    for i, (request, output) in enumerate(zip(requests, texts.outputs, strict=True)):
        accepted = torch.zeros(len(output), k + 1, dtype=torch.float64)
        for s in range(len(output)):
            before = [*request.prompt, *output[:s]]
            state = target.prefill([before[:-1]])
            logits, _ = target.score(target.prefill([before[:-1]]), torch.tensor([[before[-1], *output[s:]]]))
            sampling = SamplingState.of([request.id], [request.params], [request.prompt], [output[:s]], 40)
            drafts = torch.tensor([output[s:]])
            target_probs = sampling.probs(logits[:, :-1], drafts[:, :-1], "target")
            first = [len(request.prompt) - 1]
            stream = head.start([request.prompt], target.features(target.prefill([request.prompt[:-1]]), first))
            if s:
                stream = head.commit(stream, [output[:s]], target.features(state, [s]))
            draft_logits, stream = head.first(stream)
            chance = 1.0
            for depth in range(min(k, len(output) - s, request.max_new_tokens - s - 1)):
                if depth > 0:
                    draft_logits, stream = head.next(stream, drafts[:, depth - 1 : depth])
                draft_probs = drafter.draft_probs(draft_logits, sampling, drafts[:, :depth])
                token = output[s + depth]
                chance *= float((draft_probs[0, 0, token] / target_probs[0, depth, token]).clamp(max=1))
                accepted[s, depth + 1] = chance
        for num in range(1, k + 1):
            begun, at_least = torch.zeros(len(output) + k + 2), accepted[:, : num + 1].clone()
            at_least[:, 0], begun[0] = 1.0, 1.0
            for s in range(len(output)):
                exactly = at_least[s] - torch.cat([at_least[s, 1:], torch.zeros(1, dtype=torch.float64)])
                begun[s + 1 : s + num + 2] += begun[s] * exactly
            steps = float(begun[: len(output)].sum())
            assert float(counts[num - 1].steps[i, 0]) == pytest.approx(steps, rel=1e-5)


def test_a_target_without_the_heads_features_is_refused(target, head):
    drafter = ModelDrafter(head, 40, ratio=1.0)
    with pytest.raises(UsageError, match=r"features of its layers \[0, 1, 3\]"):
        run(tiny_model(), drafter, Rejection(), asked(1))
    with pytest.raises(UsageError, match="layers \\[0, 1\\]"):
        run(target.with_features((0, 1)), drafter, Rejection(), asked(1))
    with pytest.raises(UsageError, match="feature_layers: expected layers from 0 to 3"):
        target.with_features((0, 4))


def test_a_request_may_end_and_others_join(target, head):
    requests = [dataclasses.replace(r, max_new_tokens=1 + i) for i, r in enumerate(asked(8))]
    drafter = ModelDrafter(head, 40, ratio=1.0)
    alone = run(target, drafter, Rejection(), requests, batch_size=1)
    found = run(target, drafter, Rejection(), requests, batch_size=2)
    assert {key: outcome(one) for key, one in found.items()} == {key: outcome(one) for key, one in alone.items()}
