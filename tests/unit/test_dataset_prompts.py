"""Prompts out of data sets: files of every format and shape, selection, conversations, and what is refused."""

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from spectoolkit.dataset_prompts import load_datasets
from spectoolkit.errors import UsageError
from spectoolkit.prompts import Message, Prompt

CONFIGS = Path(__file__).parents[2] / "configs" / "prompts"
HUMAN_GPT = [
    {"from": "human", "value": "one"},
    {"from": "gpt", "value": "two"},
    {"from": "human", "value": "three"},
    {"from": "gpt", "value": "four"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Caches of data sets go to a fresh folder, and nothing is asked of a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def write(tmp_path):
    """Write rows to a file in the format that its name ends in, and return its path."""

    def write_rows(*rows, name="rows.jsonl"):
        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        elif path.suffix == ".csv":
            pd.DataFrame(rows).to_csv(path, index=False)
        else:
            pd.DataFrame(rows).to_parquet(path, index=False)
        return str(path)

    return write_rows


def ids(prompts):
    return [prompt.id for prompt in prompts]


# Where from


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_a_file_of_every_format_is_the_split_that_is_asked_for(write, name):
    path = write({"body": "one", "n": 1}, {"body": "two", "n": 2}, {"body": "three", "n": 3}, name=name)
    loaded = load_datasets(path, config_name="main", split="test[:2]", column="body")
    assert loaded == (Prompt("row-0", "all", text="one"), Prompt("row-1", "all", text="two"))
    assert load_datasets(path, split="test[1:9]", streaming=True, template="{n}: {body}") == (
        Prompt("row-0", "all", text="2: two"),
        Prompt("row-1", "all", text="3: three"),
    )


@pytest.mark.parametrize(
    ("reader", "name"), [("json", "rows.jsonl"), ("json", "rows.json"), ("parquet", "rows.parquet")]
)
def test_streaming_reads_the_slice_and_gives_what_reading_all_gives(write, reader, name):
    data_files = {"test": write(*({"body": f"text {i}", "n": i} for i in range(5)), name=name)}
    for arguments in (
        {"split": "test[:2]", "column": "body"},
        {"split": "test[2:9]", "template": "{n}: {body}", "id_column": "n"},
        {"split": "test[1:4]", "column": "body", "seed": 3, "limit": 2},
    ):
        streamed = load_datasets(reader, data_files=data_files, streaming=True, **arguments)
        assert streamed == load_datasets(reader, data_files=data_files, **arguments)


def test_data_files_and_folders_as_load_dataset_takes_them(write, tmp_path_factory):
    path = write({"body": "one"})
    folder = tmp_path_factory.mktemp("mine")  # in the name of another one `load_dataset` would read "test"
    shutil.copy(path, folder)
    one = (Prompt("row-0", "all", text="one"),)
    assert load_datasets("json", data_files={"test": [path]}, split="test", column="body") == one
    assert load_datasets(str(folder), column="body") == one


# What


def test_template_with_ids_categories_and_a_system_message(write):
    path = write(
        {"key": 10, "kind": "x", "article": "one", "meta": {"by": "two"}},
        {"key": 11, "kind": "x", "article": "two", "meta": {"by": "two"}},
        {"key": 12, "kind": "y", "article": "three", "meta": {"by": "two"}},
    )
    arguments = {"id_column": "key", "category_column": "kind", "limit": 2}
    template = "Summarise {{this}}: {article} by {meta[by]}"
    assert load_datasets(path, template=template, **arguments) == (
        Prompt("10", "x", text="Summarise {this}: one by two"),
        Prompt("12", "y", text="Summarise {this}: three by two"),
    )
    for source in ({"template": "{article}"}, {"column": "article"}):
        loaded = load_datasets(path, **source, system="Be brief, {kind}.", limit=1)
        assert loaded[0].messages == (Message("system", "Be brief, x."), Message("user", "one"))


def test_a_column_of_messages_ends_with_the_user(write):
    answered = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    loaded = load_datasets(write({"chat": answered}, {"chat": answered[:1]}), column="chat")
    assert [prompt.messages for prompt in loaded] == [(Message("user", "one"),)] * 2
    assert loaded.changes == {}  # an answer is no part of a prompt


def test_conversations_of_from_and_value_and_how_many_turns_are_kept(write):
    path = write({"id": "a", "conversations": HUMAN_GPT}, {"id": "b", "conversations": HUMAN_GPT[:2]}, name="rows.json")
    whole = load_datasets(path, column="conversations", id_column="id", system="Be brief.")
    assert [message.role for message in whole[0].messages] == ["system", "user", "assistant", "user"]
    assert [message.content for message in whole[0].messages] == ["Be brief.", "one", "two", "three"]
    first = load_datasets(path, column="conversations", id_column="id", turns=1)
    assert [prompt.messages for prompt in first] == [(Message("user", "one"),)] * 2
    assert first.changes == {"prompts without the user's later turns": 1}
    assert load_datasets(path, column="conversations", turns=2).changes == {}


def test_a_conversation_keeps_its_own_system_message(write):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "one"}]
    (loaded,) = load_datasets(write({"chat": own}), column="chat", system="other")
    assert loaded.messages == (Message("system", "own"), Message("user", "one"))


def test_of_what_a_user_says_in_turn_the_first_is_asked(write):
    path = write({"prompt": ["one", "two"]}, {"prompt": ["three", "four"]})
    loaded = load_datasets(path, column="prompt")
    assert [prompt.text for prompt in loaded] == ["one", "three"]
    assert loaded.changes == {"prompts without the user's later turns": 2}
    with pytest.raises(UsageError, match=r"turns: expected 1 for 'prompt', which holds no answers .*got 2"):
        load_datasets(path, column="prompt", turns=2)


# Which


def test_limit_takes_the_first_and_a_seed_draws(write):
    path = write(*({"body": f"text {i}"} for i in range(30)))
    assert ids(load_datasets(path, column="body", limit=3)) == ["row-0", "row-1", "row-2"]
    drawn = load_datasets(path, column="body", limit=8, seed=1)
    numbers = [int(identifier.removeprefix("row-")) for identifier in ids(drawn)]
    assert numbers == sorted(set(numbers)) != list(range(8))
    assert [prompt.text for prompt in drawn] == [f"text {number}" for number in numbers]
    assert drawn != load_datasets(path, column="body", limit=8, seed=2)
    assert set(ids(load_datasets(path, column="body", limit=5, seed=1))) < set(ids(drawn))
    within = load_datasets(path, split="train[:6]", column="body", limit=5, seed=1)
    assert {int(name[4:]) for name in ids(within)} < set(range(6))


def test_a_seed_draws_within_the_categories(write):
    path = write(*({"body": f"text {i}", "kind": "rare" if i == 17 else "common"} for i in range(30)))
    for seed in range(3):
        drawn = load_datasets(path, column="body", category_column="kind", limit=2, seed=seed)
        assert {prompt.category for prompt in drawn} == {"rare", "common"}


def test_bad_rows_are_left_out_and_counted_and_others_take_their_places(write):
    path = write({"body": "one"}, {"body": None}, {"body": " "}, {"body": "four"}, {"body": "five"})
    with pytest.raises(UsageError, match="row 1: 'body': expected a non-empty string; got None"):
        load_datasets(path, column="body", limit=2)
    loaded = load_datasets(path, column="body", limit=2, bad_rows="skip")
    assert ids(loaded) == ["row-0", "row-3"]
    ((what, count),) = loaded.changes.items()
    assert count == 2
    assert "rows skipped (first: " in what
    assert "row 1: 'body': expected a non-empty string" in what
    with pytest.raises(UsageError, match="bad_rows: expected at least one row that gives a prompt, got none"):
        load_datasets(write({"body": ""}), column="body", bad_rows="skip")


# Refused

ROWS = (
    {"body": "one", "empty": "x", "kind": "x", "mixed": {"role": "user"}, "number": 1},
    {"body": "two", "empty": None, "kind": "x", "mixed": {"role": "user"}, "number": 2},
)
COLUMNS = "body, empty, kind, mixed, number"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "column, template: expected exactly one of them; got neither"),
        ({"column": "body", "template": "{body}"}, "column, template: expected exactly one of them; got both"),
        ({"column": "body", "split": None}, "split: expected the name of a split"),
        (
            {"column": "body", "split": "train", "streaming": True},
            r"split: expected with streaming=true the rows .*'tr",
        ),
        ({"column": "body", "split": "train[:5%]", "streaming": True}, "split: expected with streaming=true the rows"),
        ({"column": "body", "limit": 0}, "limit: expected a whole number"),
        ({"column": "body", "turns": 0}, "turns: expected a whole number of at least 1, or null; got 0"),
        ({"column": "body", "seed": -1}, "seed: expected a whole number of at least 0, or null; got -1"),
        ({"column": "body", "bad_rows": "drop"}, "bad_rows: expected error or skip; got 'drop'"),
        ({"column": "text"}, rf"column: expected one of the available columns \({COLUMNS}\); got 'text'"),
        ({"column": "text", "split": "train[:1]", "streaming": True}, rf"available columns \({COLUMNS}\); got 'text'"),
        ({"template": "{body} {x[y]}"}, r"template: expected one of the available columns \(body, .*\); got 'x'"),
        ({"column": "body", "system": "{x}"}, r"system: expected one of the available columns \(body, .*\); got 'x'"),
        ({"column": "body", "id_column": "key"}, r"id_column: expected one of the available columns .*; got 'key'"),
        ({"column": "body", "category_column": "key"}, "category_column: expected one of the available .*; got 'key'"),
        ({"column": "body", "category_column": "empty"}, "row 1: 'empty': expected a non-empty string or a whole"),
        ({"column": "body", "id_column": "kind"}, "prompt id: expected unique ids; 'x' occurs twice"),
        ({"column": "number"}, r"row 0: 'number': expected a non-empty string; got 1 \(int\)"),
        ({"column": "mixed"}, r"row 0: 'mixed': expected a non-empty string; got \{'role'.* \(dict\)"),
        ({"column": "empty"}, "row 1: 'empty': expected a non-empty string; got None"),
        ({"template": "{empty}"}, "row 1: template: expected a value in column 'empty'; got None"),
        ({"column": "body", "system": "{empty}"}, "row 1: system: expected a value in column 'empty'; got None"),
        ({"template": "{body:d}"}, "row 0: template: expected one that fits the row; got '{body:d}'"),
        ({"template": "{body.x}"}, "row 0: template: expected one that fits the row"),
        ({"template": "{body"}, "template: expected a str.format template; got '{body'"),
        ({"template": 5}, "template: expected a str.format template; got 5"),
        ({"template": "no columns"}, "template: expected named columns in braces"),
        ({"template": "{}"}, "template: expected named columns in braces"),
        ({"column": "body", "system": "{}"}, "system: expected named columns in braces"),
    ],
)
def test_refused(write, arguments, message):
    with pytest.raises(UsageError, match=message):
        load_datasets("json", **{"data_files": write(*ROWS), **arguments})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "robot", "content": "one"}], "row 0: 'chat' message 1: message role: expected one of .*got 'robot'"),
        ([{"from": "robot", "value": "one"}], "row 0: 'chat' message 1: message role: expected one of .*got 'robot'"),
        ([{"from": "human", "value": ""}], "row 0: 'chat' message 1: message content: expected a non-empty string"),
        ([{"who": "human", "value": "one"}], "row 0: 'chat' message 1: expected {role, content}; got {'who'"),
        (HUMAN_GPT[1:], "row 0: 'chat': expected a conversation that begins with the user; got the assistant"),
        ([{"role": "system", "content": "one"}], "row 0: .*expected the last message to be the user's"),
        ([], "row 0: 'chat': expected at least one message; got none"),
    ],
)
def test_bad_conversations(write, chat, message):
    with pytest.raises(UsageError, match=message):
        load_datasets(write({"chat": chat, "n": 1}), column="chat")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_that_does_not_exist_names_those_there_are(write, streaming):
    with pytest.raises(UsageError, match=r"expected a source that .*can read; .*(Bad|Unknown) split.*train"):
        load_datasets("json", data_files=write(*ROWS), split="tset[:1]", column="body", streaming=streaming)


def test_files_that_are_no_data(write, tmp_path):
    with pytest.raises(UsageError, match=r"path: expected a readable file; '.*absent.jsonl' is not there"):
        load_datasets(str(tmp_path / "absent.jsonl"), column="body")
    (tmp_path / "rows.txt").write_text("one\n")
    with pytest.raises(UsageError, match=r"path: expected a file that ends in .json, .jsonl, .csv, .parquet; got"):
        load_datasets(str(tmp_path / "rows.txt"), column="body")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"body": "one"}\n{"body": \n')
    with pytest.raises(UsageError, match=r"expected a source that datasets.load_dataset can read; got path=.*broken"):
        load_datasets(str(broken), column="body")
    with pytest.raises(UsageError, match=r"expected a source that datasets.load_dataset can read; got path='json'"):
        load_datasets("json", data_files=str(broken), split="train[:2]", column="body", streaming=True)


def test_without_rows(write):
    path = write({"body": "one"})
    with pytest.raises(UsageError, match=r"path: expected at least one row in split 'train\[1:1\]' of .*; got none"):
        load_datasets("json", data_files=path, split="train[1:1]", column="body", streaming=True)
    with pytest.raises(UsageError, match=r'"train\[1:1\]" corresponds to no data'):
        load_datasets(path, split="train[1:1]", column="body")
    Path(path).with_suffix(".csv").write_text("body\n")
    with pytest.raises(UsageError, match=r"rows\.csv.*corresponds to no data"):
        load_datasets(str(Path(path).with_suffix(".csv")), column="body")


@pytest.mark.parametrize("streaming", [False, True])
def test_without_a_network_the_message_says_how_to_go_on(streaming):
    with pytest.raises(UsageError) as caught:
        load_datasets("some/dataset", split="train[:5]", column="body", streaming=streaming)
    message = str(caught.value)
    assert message.startswith("path: 'some/dataset' is neither here nor can the Hugging Face hub be reached")
    assert "prompts.path=FILE" in message
    assert len(message) < 400


def test_without_the_package(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"prompts: expected the package datasets .*; pip install datasets"):
        load_datasets(write(*ROWS), column="body")


def test_the_package_is_imported_only_when_used():
    script = (
        "import sys, spectoolkit.dataset_prompts, spectoolkit.prompts as p; p.load_builtin(); "
        "print(sorted({'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


# Configuration files


def test_the_configuration_matches_the_loader():
    config = yaml.safe_load((CONFIGS / "datasets.yaml").read_text())
    assert config.pop("_target_") == f"{load_datasets.__module__}.{load_datasets.__name__}"
    assert (config.pop("max_tokens"), config.pop("too_long"), config.pop("chat_template")) == (None, "error", True)
    parameters = inspect.signature(load_datasets).parameters
    assert config == {key: "???" if p.default is p.empty else p.default for key, p in parameters.items()}
