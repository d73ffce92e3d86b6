"""A few rows in the shape of every data set that `configs/prompts` has a recipe of, as a copy of one's own would be."""

import json
from pathlib import Path

import pandas as pd

RECIPES = {
    "c4": (
        "c4.jsonl",
        [{"text": f"page {i} " + "word " * 40, "timestamp": "2019-04-25", "url": "u"} for i in range(3)],
    ),
    "cnn_dailymail": (
        "articles.parquet",
        [{"article": f"article {i} " + "word " * i, "highlights": "h", "id": f"id{i}"} for i in (1, 2, 2000)],
    ),
    "gsm8k": ("questions.csv", [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]),
    "mt_bench": (
        "question.jsonl",
        [
            {"prompt": [f"first {i}", f"second {i}"], "prompt_id": i, "category": category, "reference": []}
            for i, category in enumerate(("writing", "maths", "maths"))
        ],
    ),
    "sharegpt": (
        "conversations.json",
        [
            {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}] * 2},
            {"id": "b", "conversations": [{"from": "gpt", "value": "two"}, {"from": "human", "value": "one"}]},
            {"id": "c", "conversations": [{"from": "human", "value": "word " * 2000}]},
            {"id": "d", "conversations": []},
            {"id": "e", "conversations": [{"from": "human", "value": "five"}]},
        ],
    ),
}


def recipe_file(name: str, folder: Path) -> Path:
    """The rows of a recipe in a file of its format."""
    file_name, rows = RECIPES[name]
    path = folder / file_name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        pd.DataFrame(rows).to_parquet(path, index=False)
    return path
