"""`make gpu-check` on a machine without a GPU: what it would run, what it says, and how it ends."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from spectoolkit import config
from tests.gpu import check

NOTHING_LACKS: dict[str, str] = {}


def stub(states):
    """A runner that only notes the parts, and gives them these states."""
    seen = []

    def run(part, folder, lacking, left_s):
        seen.append((part, left_s))
        if states[part.name] == "breaks":
            raise OSError("no room")
        return check.Outcome(part.name, states[part.name], 1.0, "said")

    return run, seen


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (("passed", "passed", "passed"), 0),
        (("passed", "skipped", "passed"), 0),
        (("failed", "passed", "passed"), 1),
        (("breaks", "passed", "passed"), 1),
        (("skipped", "skipped", "skipped"), 1),
    ],
)
def test_every_part_is_run_and_the_summary_says_what_became_of_it(states, code, tmp_path, capsys):
    names = ("tests", "kernel_benchmark", "engine_benchmark")
    run, seen = stub(dict(zip(names, states, strict=True)))
    assert check.check(tmp_path / "new", NOTHING_LACKS, "a device", is_dry=True, run=run) == code
    assert tuple(part.name for part, _ in seen) == names
    assert all(0 < left_s <= check.TOTAL_S for _, left_s in seen)
    text = (tmp_path / "new" / "summary.md").read_text()
    assert text in capsys.readouterr().out
    assert text.startswith("On a device:")
    for name, state in zip(names, states, strict=True):
        assert f"| {name} | {'failed' if state == 'breaks' else state} |" in text


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize("lacking", [{}, {"gguf": "not installed"}])
def test_the_studies_of_the_plan_are_settings_that_there_are(is_dry, lacking, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    parts = check.plan(tmp_path, lacking, is_dry=is_dry)
    assert sum(part.limit_s for part in parts) < check.TOTAL_S < 600
    for part in parts[1:]:
        assert part.command[:2] == ("-m", "spectoolkit.cli")
        study = config.plan(list(part.command[2:]))
        assert str(study.folder) == str(part.tables)
    sizes = [cell.settings["batch_size"] for cell in study.cells]
    assert sizes == ([1, 2] if is_dry else [1, 8, 32, 128, 256])
    assert max(sizes) <= study.cells[0].num_requests
    expected = "random" if is_dry or lacking else "smollm2"
    assert study.cells[0].settings["target.name"] == expected


def test_missing_and_old_packages_are_found_and_the_command_names_them(monkeypatch):
    assert not check.missing_packages(check.requirements()).keys() & {"torch", "transformers", "pandas", "pytest"}
    lacking = check.missing_packages({"transformers": ">=999", "torch": ">=2.0"})
    assert lacking["transformers"].endswith(", expected >=999")
    assert "torch" not in lacking

    def not_there(package):
        raise check.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(check.importlib.metadata, "version", not_there)
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None if name in ("hydra", "gguf") else name)
    lacking = check.missing_packages({})
    assert lacking == {"hydra-core": "not installed", "gguf": "not installed"}
    said = check.how_to_carry(lacking)
    assert "pip install --no-deps -c constraints.txt --target build/carried hydra-core gguf\n" in said
    assert "random weights" in said


def without(monkeypatch, *packages):
    """As if these were not installed."""
    version, find_spec = check.importlib.metadata.version, check.importlib.util.find_spec
    modules = {check.MODULES.get(package, package) for package in packages}

    def version_of(package):
        if package in packages:
            raise check.importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(check.importlib.metadata, "version", version_of)
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None if name in modules else find_spec(name))


def test_without_transformers_and_pandas_they_are_listed_and_the_parts_left_out(tmp_path, monkeypatch, capsys):
    without(monkeypatch, "transformers", "pandas")
    assert check.main(["--missing"]) == 0
    said = capsys.readouterr().out
    assert "  transformers: not installed\n" in said
    assert "  pandas: not installed\n" in said
    assert "pip install -c constraints.txt --target build/carried transformers\n" in said
    assert "pip install --no-deps -c constraints.txt --target build/carried pandas" in said
    assert check.main(["--dry-run", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.count("| skipped | 0 | needs transformers, pandas |") == 3


def test_without_torch_nothing_is_run_and_the_list_is_said(tmp_path, monkeypatch, capsys):
    without(monkeypatch, "torch")
    assert check.main(["--dry-run", "--folder", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "  torch: not installed\n" in said
    assert said.endswith("gpu-check: expected torch to be installed\n")
    assert not (tmp_path / "new").exists()
    assert check.main(["--missing"]) == 0
    assert "torch is not brought along" in capsys.readouterr().out


def test_without_packaging_no_version_is_judged(monkeypatch, capsys):
    without(monkeypatch, "packaging")
    monkeypatch.setitem(sys.modules, "packaging.specifiers", None)  # importing it raises
    assert check.main(["--missing"]) == 0
    assert "  packaging: not installed\n" in capsys.readouterr().out


def test_what_is_missing_is_said_by_a_python_that_has_nothing():
    bare = [sys.executable, "-I", "-S", "tests/gpu/check.py", "--missing"]  # no site-packages
    shown = subprocess.run(bare, cwd=check.ROOT, capture_output=True, text=True, check=True)
    assert "  torch: not installed\n" in shown.stdout
    assert not shown.stderr


def part(code, limit_s=20.0, needs=(), tables=None):
    return check.Part("p", needs, ("-c", code), limit_s, {"SAID": "so"}, tables)


def test_a_part_is_run_with_what_was_carried(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "CARRIED", tmp_path / "carried")
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "brought_along.py").write_text("NAME = 'brought'")
    code = "import brought_along, os; print(brought_along.NAME, os.environ['SAID'], os.environ['HF_HUB_OFFLINE'])"
    found = check.run_part(part(code), tmp_path, {}, 100)
    assert (found.state, found.said) == ("passed", "brought so 1")


def test_a_part_without_its_packages_or_time_is_skipped(tmp_path):
    found = check.run_part(part("", needs=("gguf",)), tmp_path, {"gguf": "not installed"}, 100)
    assert (found.state, found.said) == ("skipped", "needs gguf")
    assert check.run_part(part(""), tmp_path, {}, 0.5).state == "skipped"


@pytest.mark.parametrize(
    ("last", "state"), [("3 passed, 1 skipped in 2s", "passed"), ("87 skipped in 5.88s", "skipped")]
)
def test_tests_that_were_all_skipped_have_not_passed(last, state, tmp_path):
    found = check.run_part(part(f"print('.'); print('== {last} ==')"), tmp_path, {}, 100)
    assert (found.state, found.said) == (state, last)


def test_a_part_that_fails_shows_its_end(tmp_path, capsys):
    found = check.run_part(part("print('the reason'); raise SystemExit(3)"), tmp_path, {}, 100)
    assert (found.state, found.said) == ("failed", "exit code 3")
    assert "the reason" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):  # which `check` takes for a failure
        check.run_part(part("", tables=tmp_path / "none"), tmp_path, {}, 100)


def test_a_part_that_takes_too_long_is_stopped_with_its_children(tmp_path):
    ends = tmp_path / "child"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(ends)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = check.run_part(part(code, limit_s=1.0), tmp_path, {}, 100)
    assert (found.state, found.said) == ("failed", "stopped after 1 s")
    time.sleep(2.5)
    assert not ends.exists()


def test_without_a_gpu_nothing_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check.main(["--folder", str(tmp_path / "new")]) == 2
    assert "expected a GPU, found none" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert check.main(["--missing"]) == 0


def test_the_script_runs_by_its_path_and_by_make():
    shown = subprocess.run(
        [sys.executable, "tests/gpu/check.py", "--help"], cwd=check.ROOT, capture_output=True, text=True, check=True
    )
    assert "--dry-run" in shown.stdout
    made = (Path(check.ROOT) / "Makefile").read_text().split("gpu-check:", 1)[1].split("\n\n")[0]
    assert "tests/gpu/check.py $(ARGS)" in made
    assert "install" not in made.splitlines()[0].split("##")[0]  # which needs an index
