"""Other ways to make the target's forward pass give the same logits, hence the same output."""

import pytest
import torch

from spectoolkit.chains import score_proposal
from spectoolkit.datatypes import PAD, Chains, PointMass, Proposal, Request, SamplingParams
from spectoolkit.decode import decode
from spectoolkit.drafters import NGramDrafter
from spectoolkit.errors import ContractError
from spectoolkit.models.prefix_cache import PrefixCache
from spectoolkit.models.tabular import random_tabular
from spectoolkit.scoring import score_by_length, score_expanded
from spectoolkit.verifiers import Match
from tests.helpers.tiny_models import tiny_model

WAYS = [score_expanded, score_by_length]
PREFIXES = [(1, 2, 3, 4, 5), (6,), (), (7, 1, 2)]
LENGTHS = [3, 0, 1, 3]


def proposal(vocab_size: int) -> tuple[torch.Tensor, Proposal]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (len(PREFIXES), 4), generator=generator)
    lengths = torch.tensor(LENGTHS)
    drafts = tokens[:, 1:].masked_fill(torch.arange(3) >= lengths[:, None], PAD)
    return tokens[:, :1], Proposal(drafts, lengths, PointMass())


def models():
    llama = tiny_model()
    return [random_tabular(vocab_size=9, order=2), llama, PrefixCache(llama, 100), llama.with_features([0, 1, 2])]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(4))
def test_every_way_scores_as_one_forward_does(way, number):
    model = models()[number]
    last, drafts = proposal(8)
    expected, usual = score_proposal(model, model.prefill(PREFIXES), last, drafts)
    logits, state = way(model, model.prefill(PREFIXES), last, drafts)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(logits[row, : length + 1], expected[row, : length + 1], atol=1e-5, rtol=1e-4)
    # And the states are as good as each other from there on, also after a ragged rollback.
    kept = [len(p) + n for p, n in zip(PREFIXES, [2, 1, 2, 4], strict=True)]
    more = torch.tensor([[1], [2], [3], [4]])
    usual, state = model.rollback(usual, kept), model.rollback(state, kept)
    if getattr(model, "feature_layers", ()):
        torch.testing.assert_close(model.features(state, [2, 1, 2, 4]), model.features(usual, [2, 1, 2, 4]))
    torch.testing.assert_close(model.score(state, more)[0], model.score(usual, more)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_one_forward(way):
    target = tiny_model()
    params = SamplingParams(temperature=0.7, repetition_penalty=1.2)
    requests = [Request(f"r{i}", (i + 1, 2, 3, 2, 3), 6 + i, params) for i in range(5)]

    def outputs(**options):
        found = decode(target, NGramDrafter(2, 1), Match(), requests, num_draft_tokens=3, batch_size=3, **options)
        return {completion.request.id: (completion.tokens, len(completion.steps)) for completion in found}

    assert outputs(score=way) == outputs()


@pytest.mark.parametrize("way", WAYS)
def test_chains_are_refused(way):
    model = random_tabular(vocab_size=4)
    law = Chains(torch.full((1, 2, 1, 4), 0.25), with_replacement=True)
    chains = Proposal(torch.zeros(1, 2, 1, dtype=torch.long), torch.ones(1, dtype=torch.long), law)
    with pytest.raises(ContractError, match="expected one chain of drafts, got 2"):
        way(model, model.prefill([(1,)]), torch.zeros(1, 1, dtype=torch.long), chains)
