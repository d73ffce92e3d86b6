"""Recursive rejection over several chains: against a rule written out in lists, by enumeration, and its contracts."""

import dataclasses
import itertools
import random

import pytest
import torch

from spectoolkit.batch import draft_noise, verify_noise
from spectoolkit.datatypes import PAD, Chains, Dense, DraftNoise, Proposal, SamplingParams, Uniforms
from spectoolkit.decode import check_pair
from spectoolkit.drafters import ChainsDrafter, ModelDrafter
from spectoolkit.errors import ContractError, UsageError
from spectoolkit.exactness.boxes import integrate
from spectoolkit.exactness.proof import EXACT, prove
from spectoolkit.exactness.traced import UntraceableError
from spectoolkit.functional.noise import Role, chain_uniforms, request_key, uniforms
from spectoolkit.replay import check_replayable
from spectoolkit.sampling import SamplingState
from spectoolkit.verifiers import Block, Recursive, Rejection
from spectoolkit.verifiers.negative_controls import DistinctAsIndependent
from tests.helpers.one_step import same_row
from tests.helpers.tiny_models import tiny_head, tiny_model
from tests.helpers.toys import toy_pair

P, Q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# The rule, sequence by sequence, in lists


def first_above(weights, u):
    total, goal = 0.0, u * sum(weights)
    for token, weight in enumerate(weights):
        total += weight
        if total > goal and weight > 0:
            return token
    raise AssertionError("no weight")


def reference(p, q, chains, length, accept, emit, with_replacement):
    """Accepted prefix and the token behind it; p and q give a row for a prefix, `chains` are tuples, () for none."""
    prefix = ()
    while len(prefix) < length:
        n, row, tried = len(prefix), p[prefix], []
        for c, chain in enumerate(chains):
            if len(chain) == 0 or chain[:n] != prefix:
                continue
            x = chain[n]
            weights = [0.0 if n == 0 and not with_replacement and y in tried else w for y, w in enumerate(q[prefix])]
            drawn_from = [w / sum(weights) for w in weights]
            if accept[c][n] * drawn_from[x] < row[x]:
                prefix = (*prefix, x)
                break
            left = [max(a - b, 0.0) for a, b in zip(row, drawn_from, strict=True)]
            row = [w / sum(left) for w in left]
            tried.append(x)
        else:
            return prefix, first_above(row, emit[n])
    return prefix, first_above(p[prefix], emit[length])


def random_case(rng, with_replacement, vocab_size=4):
    """Tables of rows by prefix, chains drawn from them, and everything as tensors of one sequence."""
    num_chains, num_drafts = rng.randint(1, 4), rng.randint(1, 3)
    prefixes = [x for n in range(num_drafts + 1) for x in itertools.product(range(vocab_size), repeat=n)]

    def table(zeros):
        rows = {}
        for prefix in prefixes:
            weights = [0.0 if rng.random() < zeros else rng.random() ** 2 + 1e-3 for _ in range(vocab_size)]
            weights[rng.randrange(vocab_size)] += 0.1
            rows[prefix] = [w / sum(weights) for w in weights]
        return rows

    p, q = table(0.2), table(0.3)
    length, chains = rng.randint(0, num_drafts), []
    for _ in range(num_chains):
        taken = () if with_replacement or length == 0 else [chain[0] for chain in chains if chain]
        weights = [0.0 if y in taken else w for y, w in enumerate(q[()])]
        chain = ()
        while len(chain) < length and (chain or sum(weights) > 0):
            chain = (*chain, first_above(q[chain] if chain else weights, rng.random()))
        chains.append(chain)
    accept = [[rng.random() for _ in range(num_drafts)] for _ in range(num_chains)]
    emit = [rng.random() for _ in range(num_drafts + 1)]
    filled = [(*chain, *[0] * (num_drafts - len(chain))) for chain in chains]
    proposal = Proposal(
        torch.tensor([[[*chain, *[PAD] * (num_drafts - len(chain))] for chain in chains]]),
        torch.tensor([length]),
        Chains(tensor([[[q[chain[:n]] for n in range(num_drafts)] for chain in filled]]), with_replacement),
    )
    rows = tensor([[[p[chain[:n]] for n in range(num_drafts + 1)] for chain in filled]])
    return p, q, chains, length, accept, emit, rows, proposal, Uniforms(tensor([accept]), tensor([emit]))


@pytest.mark.parametrize("with_replacement", [True, False])
def test_the_rule_is_the_one_written_out(with_replacement):
    rng, later, missing = random.Random(7), 0, 0
    for _ in range(800):
        p, q, chains, length, accept, emit, rows, proposal, noise = random_case(rng, with_replacement)
        prefix, last = reference(p, q, chains, length, accept, emit, with_replacement)
        verdict = Recursive().verify(rows, proposal, noise)
        assert verdict.num_accepted.tolist() == [len(prefix)]
        assert [token for token in verdict.emitted[0].tolist() if token != PAD] == [*prefix, last]
        chain = int(verdict.chain[0])
        assert chains[chain][: len(prefix)] == prefix
        alone = verdict.judged_alone[0].tolist()
        for n in range(rows.shape[2] - 1):
            if n > len(prefix) and n < length:
                x, before = chains[chain][n], chains[chain][:n]
                assert alone[n] == (accept[chain][n] * q[before][x] < p[before][x])
            else:
                assert alone[n] == (n < len(prefix))
        later += chain > 0
        missing += length > 0 and () in chains
    assert later > 30
    assert (missing > 20) == (not with_replacement)


@pytest.mark.parametrize("with_replacement", [True, False])
def test_a_batch_is_judged_row_by_row(with_replacement):
    rng = random.Random(3)
    cases = [random_case(rng, with_replacement) for _ in range(300)]
    cases = [case[6:] for case in cases if case[6].shape == (1, 3, 3, 4)]
    assert len({int(proposal.lengths) for _, proposal, _ in cases}) == 3
    single = [Recursive().verify(*case) for case in cases]
    rows, proposals, noises = zip(*cases, strict=True)
    together = Recursive().verify(
        torch.cat(rows),
        Proposal(
            torch.cat([one.tokens for one in proposals]),
            torch.cat([one.lengths for one in proposals]),
            Chains(torch.cat([one.law.probs for one in proposals]), with_replacement),
        ),
        Uniforms(torch.cat([one.accept for one in noises]), torch.cat([one.emit for one in noises])),
    )
    for name in ("num_accepted", "emitted", "judged_alone", "chain"):
        assert torch.equal(getattr(together, name), torch.cat([getattr(one, name) for one in single]))


def test_one_chain_is_rejection():
    generator = torch.Generator().manual_seed(2)
    rows = torch.rand(500, 4, 5, generator=generator, dtype=torch.float32).softmax(-1)
    draft = (3 * torch.rand(500, 3, 5, generator=generator)).softmax(-1)
    tokens = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(500, 3)
    lengths = torch.randint(0, 4, (500,), generator=generator)
    tokens = tokens.masked_fill(torch.arange(3) >= lengths[:, None], PAD)
    accept, emit = (torch.rand(500, n, generator=generator, dtype=torch.float64) for n in (3, 4))
    expected = Rejection().verify(rows, Proposal(tokens, lengths, Dense(draft)), Uniforms(accept, emit))
    for with_replacement in (True, False):
        proposal = Proposal(tokens[:, None], lengths, Chains(draft[:, None], with_replacement))
        found = Recursive().verify(rows[:, None], proposal, Uniforms(accept[:, None], emit))
        assert torch.equal(found.num_accepted, expected.num_accepted)
        assert torch.equal(found.emitted, expected.emitted)
        # Behind the first rejected draft too: the tests of `Rejection`.
        assert torch.equal(found.judged_alone, expected.judged_alone)


@pytest.mark.parametrize("with_replacement", [True, False])
def test_the_second_candidate_by_hand(with_replacement):
    """x_1 = 2 is rejected from u = .2 / .5 on, and then p_2 is token 0 alone: x_2 = 0 always passes, x_2 = 1 never.

    Of the target's row .4, .4, .2 tokens 0 and 1 are left, p_2 = 2/3, 1/3: x_2 = 1 passes always with replacement,
    q_2(1) = .3, and below (1/3) / .6 without, q_2(1) = .3 / .5.
    """

    def verdict(row, tokens, accept, emit=0.0):
        law = Chains(tensor([[[Q]] * 2]), with_replacement)
        proposal = Proposal(torch.tensor([[[x] for x in tokens]]), torch.tensor([1]), law)
        noise = Uniforms(tensor([[[u] for u in accept]]), tensor([[emit, 0.0]]))
        return Recursive().verify(tensor([[[row] * 2] * 2]), proposal, noise).emitted[0].tolist()

    assert verdict(P, [2, 0], [0.39, 0.99]) == [2, 0]
    assert verdict(P, [2, 0], [0.41, 0.99]) == [0, 0]
    assert verdict(P, [2, 1], [0.41, 0.0]) == [0, PAD]
    both_left = [0.4, 0.4, 0.2]
    assert verdict(both_left, [2, 1], [0.41, 0.555]) == [1, 0]
    assert verdict(both_left, [2, 1], [0.41, 0.557]) == ([1, 0] if with_replacement else [0, PAD])
    assert verdict(both_left, [2, 1], [0.41, 0.99], emit=0.99) == ([1, 0] if with_replacement else [0, PAD])


# Exactness


@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize("parameters", [{"ratio": 1.0}, {"constant": 0.6}])
def test_both_laws_are_proven(with_replacement, parameters):
    found = prove(
        lambda draft, vocab_size: (
            ChainsDrafter(draft, vocab_size, **parameters, num_chains=2, with_replacement=with_replacement),
            Recursive(),
        )
    )
    assert found.is_exact
    assert found.two_steps <= EXACT
    assert found.how == "enumerated, V = 3 and 2, K = 2"


def test_distinct_drafts_judged_as_independent_ones_are_seen():
    def found(with_replacement):
        return prove(
            lambda draft, vocab_size: (
                ChainsDrafter(draft, vocab_size, ratio=1.0, num_chains=2, with_replacement=with_replacement),
                DistinctAsIndependent(),
            )
        )

    assert found(False).one_step > 0.02
    assert found(True).is_exact
    rule = DistinctAsIndependent()
    assert rule.is_negative_control
    assert not rule.is_lossless


@dataclasses.dataclass(frozen=True)
class SharesDraftNoise(ChainsDrafter):
    """Wrong: all chains are drawn with the noise of the first, and so are equal."""

    def propose(self, state, sampling, max_tokens, noise):
        same = torch.cat([noise.uniforms[:, :1]] * self.num_chains, dim=1)
        return super().propose(state, sampling, max_tokens, DraftNoise(same))


@dataclasses.dataclass(frozen=True)
class SharesAcceptNoise(Recursive):
    """Wrong: all candidates of a position are judged with the same number."""

    def verify(self, target_probs, proposal, uniforms):
        accept = torch.cat([uniforms.accept[:, :1]] * proposal.num_chains, dim=1)
        return super().verify(target_probs, proposal, dataclasses.replace(uniforms, accept=accept))


@pytest.mark.parametrize(
    ("make", "rule"), [(SharesDraftNoise, Recursive()), (ChainsDrafter, SharesAcceptNoise())], ids=str
)
def test_chains_need_noise_of_their_own(make, rule):
    found = prove(lambda draft, vocab_size: (make(draft, vocab_size, ratio=1.0, num_chains=2), rule))
    assert found.one_step > 0.005


def test_too_many_boxes_are_not_enumerated(monkeypatch):
    monkeypatch.setattr("spectoolkit.exactness.boxes.MOST_BOXES", 100)
    noise = torch.arange(8, dtype=torch.float64)[None] / 8
    program = lambda boxes: boxes.uniforms(noise.expand(len(boxes), -1)) < 0.5  # noqa: E731
    with pytest.raises(UntraceableError, match="more than 100 boxes"):
        list(integrate(program))
    found = prove(lambda draft, vocab_size: (ChainsDrafter(draft, vocab_size, ratio=1.0), Recursive()))
    assert not found.is_exact
    assert found.how.startswith("not enumerated: more than 100 boxes")


# What is drafted


def propose(drafter, noise, params=SamplingParams(), vocab_size=3, prompt=(0,)):  # noqa: B008
    size, _, width = noise.shape
    state = SamplingState.of([f"r{i}" for i in range(size)], [params] * size, [prompt] * size, [()] * size, vocab_size)
    return drafter.propose(drafter.start([prompt] * size), state, [width] * size, DraftNoise(noise))


def test_first_tokens_without_replacement_follow_the_law_of_what_is_left():
    """On the middles of 20 x 20 cells, of which every cut of these rows is a multiple."""
    middles = (torch.arange(20, dtype=torch.float64) + 0.5) / 20
    noise = torch.cartesian_prod(middles, middles)[:, :, None]
    row = [0.2, 0.2, 0.6]
    drafter = ChainsDrafter(same_row(row), 3, ratio=1.0, num_chains=2, with_replacement=False)
    proposal, _ = propose(drafter, noise)
    counts = torch.zeros(3, 3).index_put((proposal.tokens[:, 0, 0], proposal.tokens[:, 1, 0]), torch.ones(400), True)
    expected = [[0.0 if x == y else row[x] * row[y] / (1 - row[x]) for y in range(3)] for x in range(3)]
    torch.testing.assert_close(counts / 400, torch.tensor(expected))
    torch.testing.assert_close(proposal.law.probs, tensor(row).expand(400, 2, 1, 3))
    assert not proposal.law.with_replacement


def test_chains_that_find_nothing_left_do_not_exist():
    rows = torch.rand(6, 4, 2, dtype=torch.float64)
    rule = Recursive()
    for row, num_first in (([0.0, 0.7, 0.3], 2), ([0.0, 1.0, 0.0], 1), ([0.2, 0.5, 0.3], 3)):
        drafter = ChainsDrafter(same_row(row), 3, ratio=1.0, num_chains=4, with_replacement=False)
        proposal, _ = propose(drafter, rows)
        assert proposal.tokens[:, num_first:].unique().tolist() == [PAD]
        assert (proposal.tokens[:, :num_first] >= 0).all()
        assert all(len(set(first)) == num_first for first in proposal.tokens[:, :num_first, 0].tolist())
        target = tensor(P).expand(6, 4, 3, 3)
        verdict = rule.verify(target, proposal, Uniforms(rows, torch.rand(6, 3, dtype=torch.float64)))
        assert (verdict.chain < num_first).all()


def test_at_temperature_zero_one_distinct_chain_is_left():
    _, draft = toy_pair()
    for with_replacement, num_chains in ((True, 3), (False, 1)):
        drafter = ChainsDrafter(draft, 5, ratio=1.0, num_chains=3, with_replacement=with_replacement)
        proposal, _ = propose(drafter, torch.rand(4, 3, 2).double(), SamplingParams(temperature=0.0), vocab_size=5)
        assert (proposal.tokens >= 0).all(-1).sum(-1).tolist() == [num_chains] * 4
        assert len(proposal.tokens[:, :num_chains].flatten(0, 1).unique(dim=0)) == 1


@pytest.mark.parametrize("with_replacement", [True, False])
def test_every_row_is_the_draft_models_behind_its_chain(with_replacement):
    _, draft = toy_pair()
    params = SamplingParams(temperature=0.8, repetition_penalty=1.5, logit_bias={2: 0.7})
    drafter = ChainsDrafter(draft, 5, ratio=1.0, num_chains=3, with_replacement=with_replacement)
    noise = torch.rand(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    proposal, _ = propose(drafter, noise, params, vocab_size=5, prompt=(1, 3))
    assert len({tuple(chain) for chain in proposal.tokens.flatten(0, 1).tolist()}) > 6
    for row, chain in itertools.product(range(4), range(3)):
        for n in range(3):
            output = proposal.tokens[row, chain, :n].tolist()
            logits, _ = draft.score(draft.prefill([[1, 3, *output][:-1]]), torch.tensor([[[1, 3, *output][-1]]]))
            state = SamplingState.of(["x"], [params], [(1, 3)], [output], 5)
            expected = state.probs(logits, torch.empty(1, 0, dtype=torch.int64), "draft")[0, 0]
            torch.testing.assert_close(proposal.law.probs[row, chain, n], expected)


def test_bytes_are_those_of_a_row_per_chain():
    drafter = ChainsDrafter(same_row(Q), 3, ratio=1.0, num_chains=5)
    proposal, _ = propose(drafter, torch.rand(2, 5, 2, dtype=torch.float64))
    assert proposal.law.bytes_per_token(1000) == drafter.bytes_per_token(1000) == 5 * 1000 * 2


# Contracts


@pytest.mark.parametrize("num_chains", [0, -1])
def test_there_is_at_least_one_chain(num_chains):
    with pytest.raises(UsageError, match=r"drafter\.num_chains: expected an integer >= 1"):
        ChainsDrafter(same_row(Q), 3, ratio=1.0, num_chains=num_chains)


def test_only_recursive_judges_chains_and_it_judges_nothing_else():
    chains, single = ChainsDrafter(same_row(Q), 3, ratio=1.0), ModelDrafter(same_row(Q), 3, ratio=1.0)
    check_pair(chains, Recursive())
    for drafter, rule in ((chains, Rejection()), (chains, Block()), (single, Recursive())):
        with pytest.raises(UsageError, match=f"{type(drafter).__name__} with {type(rule).__name__}.*'Chains'"):
            check_pair(drafter, rule)
    proposal = Proposal(torch.tensor([[2]]), torch.tensor([1]), Dense(tensor([[Q]])))
    with pytest.raises(ContractError, match="expected Chains, got Dense"):
        Recursive().verify(tensor([[P, P]]), proposal, Uniforms(tensor([[0.5]]), tensor([[0.5, 0.5]])))


def test_it_is_not_replayed():
    with pytest.raises(UsageError, match="Recursive has no given_output"):
        check_replayable(ChainsDrafter(same_row(Q), 3, ratio=1.0), Recursive(), is_greedy=False)


@pytest.mark.parametrize(
    ("tokens", "with_replacement", "is_broken"),
    [
        ([[0, 1], [0, 2]], True, False),
        ([[0, 1], [0, 2]], False, True),  # equal first tokens
        ([[0, 1], [2, 1]], False, False),
        ([[0, 1], [PAD, PAD]], False, False),  # no second chain
        ([[PAD, PAD], [0, 1]], False, True),  # the first always exists
        ([[0, 1], [2, PAD]], True, True),  # ends early
        ([[0, 1], [2, 3]], True, True),  # probability 0
    ],
)
def test_tokens_that_the_law_excludes_are_a_broken_contract(tokens, with_replacement, is_broken):
    law = Chains(tensor([[[[0.4, 0.3, 0.3, 0.0]] * 2] * 2]), with_replacement)
    proposal = Proposal(torch.tensor([tokens]), torch.tensor([2]), law)
    target = torch.full((1, 2, 3, 4), 0.25, dtype=torch.float64)
    noise = Uniforms(torch.full((1, 2, 2), 0.5).double(), torch.full((1, 3), 0.5).double())
    if is_broken:
        with pytest.raises(ContractError, match="probability 0"):
            Recursive().verify(target, proposal, noise)
    else:
        Recursive().verify(target, proposal, noise)


def test_repeated_sampling_parameters_give_the_same_rows():
    params = [
        SamplingParams(temperature=0.7, top_k=3, logit_bias={1: 2.0, 4: -1.0}),
        SamplingParams(top_p=0.8, repetition_penalty=1.4, logit_bias={0: 1.5}),
        SamplingParams(min_p=0.1, frequency_penalty=0.6, presence_penalty=0.3),
    ]
    state = SamplingState.of(["a", "b", "c"], params, [(0, 1), (2,), (3, 3)], [(4,), (), (1, 1)], 5)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3, 5, generator=generator, dtype=torch.float64)
    appended = torch.randint(0, 5, (6, 2), generator=generator)
    again = state.repeat(2)
    assert again.request_ids == ("a", "a", "b", "b", "c", "c")
    found = again.probs(logits, appended, "target")
    for chain in range(2):
        expected = state.probs(logits[chain::2], appended[chain::2], "target")
        torch.testing.assert_close(found[chain::2], expected, rtol=0, atol=0)
    assert state.repeat(1) is state


def states_of(kind):
    """A model of which states are selected, a state of two rows, what to feed, and a fresh state of the same rows."""
    prompts = [(5, 9, 3, 7), (8, 4)]
    if kind == "head":
        target = tiny_model().with_features((0, 1, 3))
        head = tiny_head(target)
        state = target.prefill([prompt[:-1] for prompt in prompts])
        features = target.features(state, [3, 1])

        def fresh():
            return head.first(head.start(prompts, features))[1]

        return head, head.next, fresh
    model = toy_pair(vocab_size=10)[0] if kind == "tabular" else tiny_model("llama")
    return model, model.score, lambda: model.prefill(prompts)


@pytest.mark.parametrize("kind", ["tabular", "llama", "head"])
def test_selecting_rows_several_times_copies_them(kind):
    model, feed, fresh = states_of(kind)
    one, other = torch.tensor([[1], [2]]), torch.tensor([[3], [4], [6], [7]])
    state = fresh()
    copies = model.select(state, [0, 0, 1, 1])
    first, copies = feed(copies, other)
    expected = [feed(model.select(fresh(), [row]), other[i : i + 1])[0][0] for i, row in enumerate((0, 0, 1, 1))]
    torch.testing.assert_close(first, torch.stack(expected))
    # The selected state is as it was, and goes on by itself.
    kept, state = feed(state, one)
    torch.testing.assert_close(kept, feed(fresh(), one)[0])
    feed(state, one)
    second, _ = feed(copies, other)
    alone = model.select(fresh(), [0, 0, 1, 1])
    _, alone = feed(alone, other)
    torch.testing.assert_close(second, feed(alone, other)[0])


# Noise


def test_the_first_chain_has_the_noise_of_an_ordinary_proposal_and_the_others_their_own():
    key = (torch.tensor([3, -4]), torch.tensor([request_key("a"), 7]), torch.tensor([5, 11]))
    ordinary, chains = draft_noise(*key, 4), draft_noise(*key, 4, 3)
    assert torch.equal(chains.uniforms[:, 0], ordinary.uniforms)
    assert torch.equal(draft_noise(*key, 4, 1).uniforms[:, 0], ordinary.uniforms)
    assert torch.equal(draft_noise(*key, 2, 5).uniforms[:, :3], chains.uniforms[:, :, :2])  # neither C nor K matters
    judged, judging = verify_noise(*key, 4), verify_noise(*key, 4, 3)
    assert torch.equal(judging.accept[:, 0], judged.accept)
    assert torch.equal(judging.emit, judged.emit)
    later = draft_noise(*key[:2], key[2] + 1, 4, 3)
    numbers = [part.flatten() for part in (chains.uniforms, judging.accept, judging.emit, later.uniforms)]
    assert len(torch.cat(numbers).unique()) == sum(map(len, numbers))


def test_the_noise_of_a_chain_is_the_documented_construction():
    mask = (1 << 64) - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def plain(*words):
        state = 0
        for word in words:
            state = mix((state + 0x9E3779B97F4A7C15 * ((word & mask) + 1)) & mask)
        return (mix(state) >> 11) / 2**53

    key = [torch.tensor([value]) for value in (-1, request_key("a"), 9)]
    found = chain_uniforms(*key, 3, Role.ACCEPT, 4)[0].tolist()
    for n in range(3):
        words = (-1, request_key("a"), 4 * 9 + Role.ACCEPT, 9 + n)
        assert [found[c][n] for c in range(4)] == [plain(*words), *(plain(*words, c) for c in (1, 2, 3))]


def test_the_noise_of_chains_is_uniform_and_independent():
    """Chi-square over 16 x 16 cells of 65,536 pairs each; false alarm 1e-9 in all."""
    from scipy import stats

    size, bins = 1 << 16, 16
    key = (torch.tensor([0]), torch.tensor([1]), torch.tensor([0]))
    chains = chain_uniforms(*key, size, Role.DRAFT, 4)[0]
    pairs = [(chains[a], chains[b]) for a, b in itertools.combinations(range(4), 2)]
    pairs += [(chains[1][1:], chains[1][:-1]), (chains[1], uniforms(*key, size, Role.ACCEPT)[0])]
    limit = stats.chi2.isf(1e-9 / len(pairs), bins**2 - 1)

    def statistic(one, other):
        cells = (one * bins).long() * bins + (other * bins).long()
        expected = len(one) / bins**2
        return ((torch.bincount(cells, minlength=bins**2) - expected) ** 2).sum() / expected

    assert all(statistic(*pair) < limit for pair in pairs)
    assert statistic(chains[1], chains[1]) > limit
