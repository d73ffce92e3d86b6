"""The example of plain objects in README.md, taken out of it and run as it is written."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "README.md"


def test_the_example_without_any_configuration_runs(capsys):
    (example,) = re.findall(
        r"^Without any configuration all parts are plain objects.*?\n\n```python\n(.*?)^```$",
        DOCUMENT.read_text(),
        re.M | re.S,
    )
    names: dict = {}
    exec(example, names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(names["requests"]) == 2
    assert {line.split()[0] for line in lines} == {"p0", "p1"}
    for line in lines:
        tokens, tokens_per_forward = re.fullmatch(r"p\d \((.*)\) (\S+) tokens per target forward", line).groups()
        assert len(tokens.split(", ")) == 16
        assert 1 < float(tokens_per_forward) <= 5
