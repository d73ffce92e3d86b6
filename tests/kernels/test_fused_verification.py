"""Verification from logits against the float64 reference: every rule, law, dtype, shape, and rows at their extremes.

On a machine without a GPU the kernels run in Triton's interpreter, elsewhere compiled. Uniforms are drawn with fixed
seeds: a verdict may differ from that of float64 where a uniform lies within float32 rounding of a threshold, which is
seldom, and none of those here does.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from spectoolkit.datatypes import Dense, PointMass, Proposal, Uniforms
from spectoolkit.functional.draw import draw, gumbel_max
from spectoolkit.functional.noise import position_keys
from spectoolkit.functional.warp import warp
from spectoolkit.kernels.verdict import INVALID_DRAFT, INVALID_TARGET, NOT_DRAWN
from spectoolkit.verifiers import Block, Coupled, Rejection

coupled = pytest.importorskip("spectoolkit.kernels.coupled")
fused = pytest.importorskip("spectoolkit.kernels.rejection_and_block")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = {Rejection(): fused.rejection, Block(): fused.block}
LAWS = ("point", "dense", "logits", "coupled")


@dataclass(frozen=True)
class Step:
    """Target logits [B, K+1, V], draft logits [B, K, V'], and a proposal that was drawn from them."""

    target: Tensor
    draft: Tensor
    temperature: Tensor
    draft_temperature: Tensor
    lengths: Tensor
    uniforms: Uniforms
    drawn_with: Tensor

    @property
    def draft_probs(self) -> Tensor:
        """As a drafter would have made them: [B, K, V'] float32."""
        vocab_size = self.target.shape[-1]
        return warp(self.draft[..., :vocab_size].float(), self.draft_temperature, None, None, None)

    def tokens(self, law: str) -> Tensor:
        if law == "coupled":
            drawn = gumbel_max(self.draft_probs, self.uniforms.shared[:, :-1])
        else:
            drawn = draw(self.draft_probs, self.drawn_with)
        beyond = torch.arange(drawn.shape[1]) >= self.lengths[:, None]
        return drawn.masked_fill(beyond, -1)

    def target_probs(self) -> Tensor:
        return warp(self.target.double(), self.temperature, None, None, None)

    def expected(self, rule, law: str):
        """The reference's verdict in float64."""
        exact = warp(self.draft[..., : self.target.shape[-1]].double(), self.draft_temperature, None, None, None)
        laws = {"point": PointMass(), "dense": Dense(self.draft_probs.double()), "logits": Dense(exact)}
        proposal = Proposal(self.tokens(law), self.lengths, laws.get(law, PointMass()))
        return rule.verify(self.target_probs(), proposal, self.uniforms)

    def found(self, rule, law: str, chunk: int | None = None):
        """The kernels' verdict, and the status."""
        logits, temperature = self.target.to(DEVICE), self.temperature.to(DEVICE)
        tokens, lengths = self.tokens(law).to(DEVICE), self.lengths.to(DEVICE)
        if law == "coupled":
            verdict, status = coupled.coupled(logits, temperature, tokens, lengths, self.shared.to(DEVICE), chunk)
        else:
            drafts = {
                "point": PointMass(),
                "dense": Dense(self.draft_probs.to(DEVICE)),
                "logits": fused.DraftLogits(self.draft.to(DEVICE), self.draft_temperature.to(DEVICE)),
            }
            noise = Uniforms(self.uniforms.accept.to(DEVICE), self.uniforms.emit.to(DEVICE))
            verdict, status = FUSED[rule](logits, temperature, tokens, lengths, drafts[law], noise, chunk)
        moved = {name: getattr(verdict, name).cpu() for name in ("num_accepted", "emitted", "judged_alone")}
        return replace(verdict, **moved), status.cpu()

    @property
    def shared(self) -> Tensor:
        assert self.uniforms.shared is not None
        return self.uniforms.shared


def step(size=4, num_drafts=3, vocab_size=100, dtype=torch.float32, seed=0, spread=2.5, draft_vocab_size=None) -> Step:
    """Rows of which some are masked with -inf, proposals of all lengths, temperatures from 0 to 1.3."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def rand(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    target = spread * normal(size, num_drafts + 1, vocab_size)
    width = draft_vocab_size or vocab_size
    draft = spread * normal(size, num_drafts, width)
    shared = min(width, vocab_size)
    draft[..., :shared] += target[:, :-1, :shared]
    masked = rand(size, num_drafts + 1, vocab_size) < 0.2 * (torch.arange(size) % 2)[:, None, None]
    masked[..., 0] = False
    target = target.masked_fill(masked, -math.inf)
    keys = position_keys(torch.arange(size), torch.arange(size) - 2, 3 * torch.arange(size), num_drafts + 1)
    return Step(
        target=target.to(dtype),
        draft=draft.to(dtype),
        temperature=torch.tensor([0.7, 1.0, 0.0, 1.3, 0.4], dtype=torch.float64).repeat(size)[:size],
        draft_temperature=torch.tensor([1.0, 0.6, 0.9, 0.0], dtype=torch.float64).repeat(size)[:size],
        lengths=num_drafts - torch.arange(size) % (num_drafts + 1),
        uniforms=Uniforms(rand(size, num_drafts), rand(size, num_drafts + 1), keys),
        drawn_with=rand(size, num_drafts),
    )


def check(one: Step, rule, law: str, chunk: int | None = None) -> None:
    expected, (found, status) = one.expected(rule, law), one.found(rule, law, chunk)
    assert status.tolist() == [0] * len(one.lengths)
    assert found.num_accepted.tolist() == expected.num_accepted.tolist()
    assert found.emitted.tolist() == expected.emitted.tolist()
    assert found.judged_alone.tolist() == expected.judged_alone.tolist()


PAIRS = [(rule, law) for rule in FUSED for law in LAWS[:3]] + [(Coupled(), "coupled")]
IDS = [f"{type(rule).__name__}-{law}" for rule, law in PAIRS]


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
def test_every_rule_and_law(rule, law):
    check(step(size=10, vocab_size=150), rule, law, chunk=128)


@pytest.mark.parametrize(("rule", "law"), [(Rejection(), "dense"), (Block(), "logits"), (Coupled(), "coupled")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(rule, law, dtype):
    check(step(size=5, vocab_size=150, dtype=dtype), rule, law, chunk=128)


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
@pytest.mark.parametrize(
    ("size", "num_drafts", "vocab_size", "chunk"), [(1, 1, 1, None), (1, 5, 17, 16), (3, 2, 16, 16), (2, 4, 65, 64)]
)
def test_every_shape(rule, law, size, num_drafts, vocab_size, chunk):
    check(step(size, num_drafts, vocab_size, seed=1), rule, law, chunk)


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
def test_a_large_vocabulary(rule, law):
    check(step(1, 1, 262_143, torch.bfloat16, seed=2), rule, law, 1 << 15)


def test_a_large_vocabulary_with_the_chunks_of_the_rule():
    check(step(1, 1, 262_144, torch.bfloat16, seed=16), Rejection(), "logits")


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
def test_no_draft_at_all_gives_the_bonus_token(rule, law):
    check(step(4, 0, 40, seed=3), rule, law, 64)


@pytest.mark.parametrize(("rule", "law"), PAIRS[:-1], ids=IDS[:-1])
def test_the_whole_range_of_uniforms(rule, law):
    """The same row under uniforms from 0 to the largest below 1: every token that it can give."""
    one, size = step(1, 1, 24, seed=4), 20
    grid = torch.cat([torch.linspace(0, 1 - 2.0**-53, size - 2, dtype=torch.float64), torch.tensor([2.0**-53, 0.5])])
    wide = replace(
        one,
        **{name: getattr(one, name).expand(size, *getattr(one, name).shape[1:]) for name in ("target", "draft")},
        temperature=torch.full((size,), 0.8, dtype=torch.float64),
        draft_temperature=torch.full((size,), 1.1, dtype=torch.float64),
        lengths=(torch.arange(size) % 4 > 0).long(),
        uniforms=Uniforms(grid[torch.arange(size) * 7 % size][:, None], torch.stack([grid, grid.flip(0)], 1)),
        drawn_with=torch.rand(size, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5)),
    )
    check(wide, rule, law, 16)


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
def test_ties_one_hot_rows_and_a_chunk_of_nothing(rule, law):
    one = step(4, 2, 48, seed=6)
    target, draft = one.target.clone(), one.draft.clone()
    target[0] = 0.0  # all tokens tie
    target[1, :, :32] = -math.inf  # the first chunks are empty
    target[2] = -math.inf
    target[2, :, 33] = 2.0  # one-hot, at T = 0
    draft[2] = 0.0
    target[3] = -math.inf
    target[3, :, 47] = -1e4  # one-hot, the last token
    draft[3, :, :47] = -math.inf
    for temperature in (one.temperature, torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)):
        lengths = torch.tensor([2, 2, 2, 1])
        check(replace(one, target=target, draft=draft, temperature=temperature, lengths=lengths), rule, law, 32)


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
def test_logits_far_apart_and_small_temperatures(rule, law):
    one = step(4, 2, 40, seed=7, spread=60.0)
    check(replace(one, temperature=torch.tensor([1e-4, 0.05, 1.0, 30.0], dtype=torch.float64)), rule, law, 32)


@pytest.mark.parametrize("law", ["dense", "logits"])
@pytest.mark.parametrize("rule", FUSED, ids=repr)
@pytest.mark.parametrize("width", [20, 70])
def test_a_draft_vocabulary_of_another_length(rule, law, width):
    one = step(3, 2, 48, seed=8, draft_vocab_size=width)
    exact = warp(one.draft[..., :48].double(), one.draft_temperature, None, None, None)
    assert exact.shape[-1] == min(width, 48)
    check(one, rule, law, 16)


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
def test_rows_in_any_place_of_memory(rule, law):
    one = step(2, 2, 40, seed=9)
    wide = torch.zeros(2, 9, 120)
    wide[:, 1:4, 10:50] = one.target
    strided = replace(one, target=wide[:, 1:4, 10:50], draft=one.draft.transpose(1, 2).contiguous().transpose(1, 2))
    check(strided, rule, law, 32)


@pytest.mark.parametrize("rule", FUSED, ids=repr)
def test_a_draft_of_probability_0_is_never_accepted(rule):
    one = step(1, 1, 40, seed=10)
    target = one.target.clone()
    target[0, 0, one.tokens("point")[0, 0]] = -math.inf
    zero = Uniforms(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64), one.shared)
    unlikely = replace(one, target=target, uniforms=zero)
    for law in LAWS[:3]:
        check(unlikely, rule, law, 16)
        assert unlikely.found(rule, law, 16)[0].num_accepted.tolist() == [0]


@pytest.mark.parametrize("rule", FUSED, ids=repr)
def test_an_empty_residual_falls_back_to_the_target(rule):
    """p and q are equal but for rounding, and the draft is rejected all the same."""
    logits = torch.zeros(1, 2, 2)
    for emit, token in ((0.25, 0), (0.75, 1)):
        noise = Uniforms(torch.tensor([[0.9995]]).double(), torch.tensor([[emit, 0.5]]).double())
        law = Dense(torch.tensor([[[0.5005, 0.5]]]))
        arguments = [logits, torch.ones(1, dtype=torch.float64), torch.tensor([[0]]), torch.tensor([1])]
        moved = Uniforms(noise.accept.to(DEVICE), noise.emit.to(DEVICE))
        verdict, status = FUSED[rule](*[a.to(DEVICE) for a in arguments], Dense(law.probs.to(DEVICE)), moved)
        assert status.tolist() == [0]
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.emitted.tolist() == [[token, -1]]


@pytest.mark.parametrize("rule", FUSED, ids=repr)
def test_a_draft_model_equal_to_the_target_is_always_accepted(rule):
    one = step(3, 4, 150, torch.bfloat16, seed=11)
    almost_1 = torch.full((3, 4), 1 - 2.0**-53, dtype=torch.float64)
    same = replace(
        one,
        draft=one.target[:, :-1],
        draft_temperature=one.temperature,
        lengths=torch.full((3,), 4),
        uniforms=replace(one.uniforms, accept=almost_1),
    )
    verdict, status = same.found(rule, "logits", 128)
    assert status.tolist() == [0] * 3
    assert verdict.num_accepted.tolist() == [4] * 3


@pytest.mark.parametrize(("rule", "law"), PAIRS, ids=IDS)
def test_rows_without_a_distribution_have_a_status_unless_they_belong_to_no_token(rule, law):
    one = step(6, 2, 40, seed=12)
    one = replace(
        one,
        lengths=torch.tensor([2, 1, 2, 0, 1, 1]),
        temperature=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.7, 1.0], dtype=torch.float64),
    )
    target = one.target.clone()
    target[0, 1, 39] = math.nan
    target[1, 2, 3] = math.nan  # behind the proposal
    target[2, 0, 17] = math.inf
    target[3, 1:] = -math.inf  # likewise
    target[4, 1] = -math.inf
    verdict, status = replace(one, target=target).found(rule, law, 32)
    assert (status & INVALID_TARGET).bool().tolist() == [True, False, True, False, True, False]
    # The sequences next to them are judged as if nothing had happened.
    expected = one.expected(rule, law)
    assert verdict.emitted[[1, 3, 5]].tolist() == expected.emitted[[1, 3, 5]].tolist()
    assert ((verdict.emitted >= -1) & (verdict.emitted < 40)).all()


@pytest.mark.parametrize("rule", FUSED, ids=repr)
def test_draft_rows_and_laws_that_cannot_be_have_a_status(rule):
    one = step(3, 2, 40, seed=13)
    one = replace(one, lengths=torch.tensor([2, 1, 2]), temperature=torch.ones(3, dtype=torch.float64))
    draft, tokens = one.draft.clone(), one.tokens("dense")
    draft[0, 1, 7] = math.nan
    draft[1, 1] = math.nan  # behind the proposal
    _, status = _with_tokens(replace(one, draft=draft), tokens, rule, "logits")
    assert (status & INVALID_DRAFT).bool().tolist() == [True, False, False]
    draft = one.draft.clone()
    draft[2, 0, tokens[2, 0]] = -math.inf  # what was drafted has probability 0
    for law in ("dense", "logits"):
        _, status = _with_tokens(replace(one, draft=draft), tokens, rule, law)
        assert status.tolist() == [0, 0, NOT_DRAWN]


def _with_tokens(one: Step, tokens: Tensor, rule, law: str):
    laws = {"dense": Dense(one.draft_probs), "logits": fused.DraftLogits(one.draft, one.draft_temperature)}
    if law == "dense":
        moved = Dense(laws[law].probs.to(DEVICE))
    else:
        moved = fused.DraftLogits(one.draft.to(DEVICE), one.draft_temperature.to(DEVICE))
    noise = Uniforms(one.uniforms.accept.to(DEVICE), one.uniforms.emit.to(DEVICE))
    arguments = [one.target, one.temperature, tokens, one.lengths]
    verdict, status = FUSED[rule](*[a.to(DEVICE) for a in arguments], moved, noise, 16)
    return verdict, status.cpu()


def test_a_row_does_not_depend_on_its_batch():
    one = step(3, 2, 100, seed=14)
    together = one.found(Block(), "dense", 64)[0].emitted
    for b in range(3):
        part = {name: getattr(one, name)[b : b + 1] for name in ("target", "draft", "temperature", "draft_temperature")}
        part |= {"lengths": one.lengths[b : b + 1], "drawn_with": one.drawn_with[b : b + 1]}
        noise = Uniforms(one.uniforms.accept[b : b + 1], one.uniforms.emit[b : b + 1], one.shared[b : b + 1])
        alone = replace(one, **part, uniforms=noise).found(Block(), "dense", 64)[0]
        assert alone.emitted.tolist() == together[b : b + 1].tolist()
