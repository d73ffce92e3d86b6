from __future__ import annotations

import pytest
import torch

from spectoolkit.errors import ContractError, UsageError
from spectoolkit.models.tabular import TabularModel, blend_tabular, random_tabular
from spectoolkit.prompts import Message, Prompt


def law(model: TabularModel, prefix: list[int]) -> torch.Tensor:
    """The next-token law after `prefix`, looked up by hand."""
    context = ([0] * model.order + prefix)[len(prefix) :]
    return model.rows[tuple(context)]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_score_is_the_log_of_the_row_of_the_last_tokens(order: int) -> None:
    model = random_tabular(vocab_size=4, order=order, seed=3)
    prefixes = [[1, 2, 3, 0, 2], [], [3]]
    tokens = torch.tensor([[1, 2], [3, 3], [0, 1]])
    logits, state = model.score(model.prefill(prefixes), tokens)
    assert logits.dtype == torch.float64
    assert state.lengths.tolist() == [7, 2, 3]
    for row, prefix in enumerate(prefixes):
        for place in range(2):
            expected = law(model, prefix + tokens[row, : place + 1].tolist())
            torch.testing.assert_close(logits[row, place].exp(), expected)


def test_rollback_select_and_insert_equal_fresh_prefills() -> None:
    model = random_tabular(vocab_size=5, order=2, seed=1)
    state = model.prefill([[1, 2], [3], [4, 4, 4]])
    _, state = model.score(state, torch.tensor([[1, 2, 3], [2, 1, 0], [0, 0, 1]]))
    state = model.rollback(state, [3, 1, 6])
    state = model.select(state, [2, 0])
    state = model.insert(state, [1], model.prefill([[2, 2, 2, 2, 2, 2, 2, 2, 3]]))
    tokens = torch.tensor([[1], [2]])
    logits, _ = model.score(state, tokens)
    fresh, _ = model.score(model.prefill([[4, 4, 4, 0, 0, 1], [2] * 8 + [3]]), tokens)
    assert torch.equal(logits, fresh)


def test_a_state_is_not_changed_by_its_use() -> None:
    model = random_tabular()
    state = model.prefill([[1, 2, 3]])
    first, _ = model.score(state, torch.tensor([[4]]))
    model.insert(state, [0], model.prefill([[7, 7, 7]]))
    again, _ = model.score(state, torch.tensor([[4]]))
    assert torch.equal(first, again)


def test_impossible_tokens_have_logit_minus_infinity() -> None:
    model = TabularModel(torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
    logits, _ = model.score(model.prefill([[]]), torch.tensor([[0]]))
    assert logits[0, 0].tolist() == [float("-inf"), 0.0]


def test_blend() -> None:
    target = random_tabular(vocab_size=4, order=1, seed=0, stop_ids=[2])
    assert torch.equal(blend_tabular(target, 1.0).rows, target.rows)
    noise = blend_tabular(target, 0.0, seed=5).rows
    half = blend_tabular(target, 0.5, seed=5)
    torch.testing.assert_close(half.rows, (target.rows + noise) / 2)
    assert half.tokenizer.stop_ids == {2}
    torch.testing.assert_close(noise, random_tabular(vocab_size=4, order=1, seed=5).rows)


def test_tokenizer() -> None:
    tokenizer = random_tabular(vocab_size=8, stop_ids=[7]).tokenizer
    assert tokenizer.encode(Prompt(id="1", category="c", text="abchi"), chat_template=False) == [0, 1, 2, 7, 0]
    messages = (Message("system", "a"), Message("user", "bc"))
    assert tokenizer.encode(Prompt(id="1", category="c", messages=messages), chat_template=True) == [0, 1, 2]
    assert tokenizer.decode([0, 1, 7]) == "abh"
    assert tokenizer.stop_ids == {7}


def test_concentration_decides_how_peaked_the_rows_are() -> None:
    assert random_tabular(concentration=0.05).rows.max(-1).values.mean() > 0.8
    assert random_tabular(concentration=100.0).rows.max(-1).values.mean() < 0.2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TabularModel(torch.ones(2, 3)), r"rows: expected a table \[V, .., V\], got shape \[2, 3\]"),
        (lambda: TabularModel(torch.ones(2, 2)), "rows: expected probabilities"),
        (lambda: TabularModel(torch.tensor([1.5, -0.5])), "rows: expected probabilities"),
        (lambda: random_tabular(vocab_size=100, order=5), "vocab_size, order: expected a table"),
        (lambda: random_tabular(concentration=0.0), "concentration: expected a finite number > 0, got 0.0"),
        (lambda: random_tabular(stop_ids=[8]), r"stop_ids: expected tokens below 8, got \[8\]"),
        (lambda: blend_tabular(random_tabular(), 1.5), r"weight: expected a number in \[0, 1\], got 1.5"),
        (lambda: blend_tabular("smollm2", 0.5), "draft_model: expected a tabular target for a tabular draft, got str"),
    ],
)
def test_unusable_arguments(make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_contract() -> None:
    model = TabularModel(torch.full((2, 2), 0.5), context_length=3)
    with pytest.raises(ContractError, match="rollback"):
        model.rollback(model.prefill([[1]]), [2])
    with pytest.raises(ContractError, match=r"tokens in \[0, 2\)"):
        model.score(model.prefill([[1]]), torch.tensor([[-1]]))
    with pytest.raises(ContractError, match="insert: expected 2 rows"):
        model.insert(model.prefill([[1], [0]]), [0, 1], model.prefill([[1]]))
    with pytest.raises(UsageError, match="at most 3 tokens of context"):
        model.score(model.prefill([[1] * 4]), torch.tensor([[1]]))
