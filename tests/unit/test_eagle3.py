"""The draft head: live against unrolled, against a plain forward of its equations, and inside the loop and replay."""

import pytest
import torch

from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.models.hf import CausalLM
from tests.helpers.tiny_models import tiny_head, tiny_model

PROMPTS = [(5, 9, 3, 7, 2), (8, 4), (6,)]
LAYERS = (0, 1, 3)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny_model().with_features(LAYERS)


@pytest.fixture(scope="module")
def head(target) -> Eagle3:
    return tiny_head(target)


def plain_states(head: Eagle3, tokens: list[int], features: torch.Tensor, num_own: int) -> torch.Tensor:
    """The head's states over a sequence of pairs, its last `num_own` inputs being its own states: one pair at a time."""
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
        hidden = given + layer.self_attn.o_proj(torch.cat(out))
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
    state = target.rollback(state, torch.tensor([6, 3, 1]))
    found = target.features(state, torch.tensor([3, 2, 1]))
    for b, (tokens, num) in enumerate([([5, 9, 3, 7, 2, 11], 3), ([8, 4, 13], 2), ([6], 1)]):
        torch.testing.assert_close(found[b, :num], features_of(target, tokens)[-num:])
    assert target.features(target.prefill([()]), torch.tensor([0])).shape == (1, 0, 96)


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}])
@torch.inference_mode()
def test_live_and_unrolled_states_are_those_of_the_equations(target, options):
    head = tiny_head(target, **options)
    outputs = [(10, 11, 12, 13, 14), (20, 21, 22, 23, 24), (30, 31, 32, 33, 34)]
    sequences = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    state = target.prefill([prompt[:-1] for prompt in PROMPTS])
    prompt_features = target.features(state, torch.tensor([4, 1, 0]))
    _, state = target.score(
        state, torch.tensor([[prompt[-1], *o[:-1]] for prompt, o in zip(PROMPTS, outputs, strict=True)])
    )
    scored = target.features(state, torch.tensor([5, 5, 5]))
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
                if options.get("norm_before_residual"):
                    continue  # its reference is the live state below
                expected = plain_states(head, list(tokens), pairs, depth)[-1]
                torch.testing.assert_close(unrolled[depth][b, n], expected, rtol=1e-4, atol=1e-5)
    # Live: three drafts from start 0, of which two are committed and a third token, then two more from start 3.
    live = head.start(PROMPTS, prompt_features)
    found = []
    for step, (start, num) in enumerate([(0, 3), (3, 2)]):
        if step == 1:
            emitted = torch.tensor([output[:3] for output in outputs])
            live = head.commit(live, emitted, scored[:, :3])
        logits, live = head.first(live)
        found.append((start, 0, logits))
        for depth in range(1, num):
            logits, live = head.next(live, torch.tensor([[output[start + depth - 1]] for output in outputs]))
            found.append((start, depth, logits))
    for start, depth, logits in found:
        torch.testing.assert_close(logits[:, 0], head.wide_logits(unrolled[depth][:, start + depth]))
