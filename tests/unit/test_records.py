"""Request rows: what is counted, and what is not when the output ends inside a block."""

from dataclasses import fields

import pandas as pd

from spectoolkit.datatypes import Completion, Request, StepRecord
from spectoolkit.records import POSITION_COLUMNS, SUM_COLUMNS, TIME_COLUMNS, request_row, step_frame
from tests.helpers.fake_rows import row, step


def test_end_of_text_inside_an_accepted_block_counts_what_was_emitted():
    # Five drafts pass, the third one ends the text: three tokens come out, not five and not six.
    cut = step(5, 5, accepted=3, emitted=3, truncated=True, judged_alone=(True,) * 5)
    made = row([cut], 5)
    assert (made["drafted"], made["verified"], made["accepted"], made["emitted"]) == (5, 5, 3, 3)
    assert made["truncated"] == 1
    assert made["drafted_at"] == [1, 1, 1, 1, 1]
    assert made["accepted_at"] == [1, 1, 1, 0, 0]
    assert made["reached_at"] == [1, 1, 1, 0, 0]  # positions 4 and 5 were cut off, so they say nothing


def test_a_position_is_reached_when_it_was_drafted_and_all_before_it_were_accepted():
    made = row([step(4, 1), step(2, 2), step(0, 0)], 4)
    assert made["drafted_at"] == [2, 2, 1, 1]
    assert made["accepted_at"] == [2, 1, 0, 0]
    assert made["reached_at"] == [2, 2, 0, 0]  # the second step accepted two but never drafted a third


def test_a_recovered_token_that_ends_the_text_still_judged_its_position():
    # Position 3 was rejected and its recovered token is the end of text: nothing was cut.
    assert row([step(5, 2, truncated=False)], 5)["reached_at"] == [1, 1, 1, 0, 0]
    # The same with the length limit before the recovered token: position 3 is not part of the output.
    assert row([step(5, 2, emitted=2, truncated=True)], 5)["reached_at"] == [1, 1, 0, 0, 0]


def test_bonus_token_cut_by_the_length_limit_reaches_every_position():
    made = row([step(3, 3, emitted=3, truncated=True)], 3)
    assert made["accepted_at"] == made["reached_at"] == [1, 1, 1]


def test_sums_run_over_steps_and_empty_slots_are_not_drafts():
    # Two drafts in a block of five slots, both accepted: the rate is 2/2.
    made = row([step(2, 2), step(0, 0), step(5, 0, judged_alone=(False, True, True, False, False))], 5)
    assert (made["steps"], made["proposing_steps"], made["drafted"], made["accepted"]) == (3, 2, 7, 2)
    assert made["emitted"] == 5
    assert made["judged_alone"] == 4
    assert row([step(2, 2)], 5)["drafted"] == 2


def test_identity_and_times():
    steps = (step(2, 1, seconds=1.0), step(2, 2, seconds=3.0))
    request = Request(id="code/3#1", prompt=(1, 2, 3, 4), max_new_tokens=5)
    made = request_row(Completion(request, (5, 6, 7, 8, 9), "length", steps, 64), 2, cluster="code/3", category="code")
    assert (made["request_id"], made["cluster"], made["category"]) == ("code/3#1", "code/3", "code")
    assert (made["engine"], made["num_draft_tokens"], made["prompt_tokens"]) == ("live", 2, 4)
    assert (made["finish_reason"], made["draft_bytes_per_token"]) == ("length", 64)
    assert abs(sum(float(made[name]) for name in TIME_COLUMNS) - 4.0) < 1e-12
    assert made["tokens"] == [5, 6, 7, 8, 9]
    assert set(SUM_COLUMNS + POSITION_COLUMNS + TIME_COLUMNS) <= set(made)


def test_step_frame_holds_every_field_and_keeps_its_columns_when_empty():
    steps = (step(2, 1), step(0, 0))
    completion = Completion(Request(id="r", prompt=(1,), max_new_tokens=3), (1, 2, 3), "length", steps, 0)
    frame = step_frame([completion])
    assert list(frame.columns) == [field.name for field in fields(StepRecord)]
    assert frame["drafted"].tolist() == [2, 0]
    assert frame["judged_alone"].tolist() == [[True, False], []]
    assert list(step_frame([]).columns) == list(frame.columns)
    assert isinstance(frame, pd.DataFrame)
