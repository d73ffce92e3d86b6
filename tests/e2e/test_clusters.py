"""One study, spread over the processes of a Hydra launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra.errors import HydraException

from spectoolkit import cli, config
from spectoolkit.errors import UsageError

ROOT = Path(__file__).parents[2]
# Two cells: two jobs to share, since they read different outputs.
STUDY = [
    *("experiment=temperature_sweep", "target=tabular", "draft_model=tabular", "prompts=jsonl", "prompts.path=p.jsonl"),
    *("max_new_tokens=5", "grid.sampling.temperature=[0.0,0.7]", "grid.drafter=[argmax]", "grid.verifier=[rejection]"),
]


def spread(folder, *launcher, workers=2):
    """The command in `folder`, where the prompts are and the results go; both are said relative to it."""
    (folder / "p.jsonl").write_text('{"id": "a", "text": "abc"}\n{"id": "b", "text": "bca"}\n')
    command = ["-m", "spectoolkit.cli", "-m", *STUDY, f"worker={','.join(map(str, range(workers)))}", *launcher]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )


def check(folder, done):
    """Each cell was computed once, and the study is there as a whole, and only where it belongs."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 2 cells are done; tables, figure and manifest are in results/temperature_sweep" in done.stdout
    study = folder / "results" / "temperature_sweep"
    assert len(pd.read_csv(study / "table.csv").query("scope == 'overall'")) == 2
    cells = json.loads((study / "manifest.json").read_text())["cells"]
    assert sorted(path.name for path in (study / "cells").iterdir()) == sorted(cell["file"] for cell in cells)
    assert not (study / "damaged").exists()
    assert {path.name for path in folder.iterdir()} == {"p.jsonl", "results"}


def test_submitit_spreads_a_study_over_jobs(tmp_path):
    done = spread(tmp_path, "hydra/launcher=submitit_local")
    check(tmp_path, done)
    logs = [path.read_text() for path in tmp_path.rglob("*_log.out")]
    assert len(logs) == 2
    assert any("acceptance length" in log.lower() for log in logs)


def test_ray_spreads_a_study_over_tasks(tmp_path):
    init = "+hydra.launcher.ray.init"
    done = spread(tmp_path, "hydra/launcher=ray", f"{init}.num_cpus=2", f"{init}.include_dashboard=false")
    check(tmp_path, done)


def test_an_error_in_a_job_goes_back_as_one_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back at the end
    with pytest.raises(HydraException, match=r"spectoolkit: Could not override 'drafter.nope'"):
        cli._run_elsewhere(["drafter.nope=1"], str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(HydraException, match="spectoolkit: cannot write file"):
        cli._run_elsewhere(["target=tabular", "draft_model=tabular", "prompts.limit=1", "folder=file"], str(tmp_path))
    with pytest.raises(HydraException, match=r"expected .*nowhere to be there on every worker \(No such file"):
        cli._run_elsewhere([], str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("launcher", "extra"), [("submitit_slurm", "slurm"), ("slurm_gpu", "slurm"), ("ray", "ray"), ("ray_gpu", "ray")]
)
def test_a_launcher_that_is_not_installed_says_what_to_install(launcher, extra, monkeypatch):
    monkeypatch.setattr(config.shutil, "which", lambda name: f"/usr/bin/{name}")  # Slurm is here
    config.check_launcher([f"hydra/launcher={launcher}", "hydra/launcher=basic", "drafter=argmax"])
    monkeypatch.setitem(config.LAUNCHERS, extra, "hydra_plugins.nowhere")
    with pytest.raises(UsageError, match=rf"hydra/launcher={launcher}: .*pip install '\.\[{extra}\]'"):
        config.check_launcher([f"hydra/launcher={launcher}"])
    monkeypatch.setitem(config.LAUNCHERS, extra, "nowhere.at_all")
    with pytest.raises(UsageError, match="pip install"):
        config.check_launcher([f"hydra/launcher={launcher}"])


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("slurm_gpu", {"gpus_per_node": 1, "timeout_min": 240, "mem_gb": 64, "max_num_timeout": 3}),
        ("ray_gpu", {"ray": {"init": {"address": None}, "remote": {"num_gpus": 1, "num_cpus": 8, "max_retries": 3}}}),
    ],
)
def test_the_launchers_with_gpus_compose(launcher, expected):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(config.config_folder()), version_base="1.3"):
        found = compose("config", [f"hydra/launcher={launcher}"], return_hydra_config=True).hydra.launcher
    plain = OmegaConf.to_container(found, resolve=False)
    assert isinstance(plain, dict)
    assert plain["_target_"].startswith("hydra_plugins.")
    assert {key: plain[key] for key in expected} == expected


def test_a_study_that_cannot_be_spread_says_so():
    with pytest.raises(UsageError, match="worker: expected null, since speed cannot be spread over processes, got 1"):
        config.plan(["experiment=speed", "worker=1"])
    with pytest.raises(UsageError, match="worker: expected null or an integer, got 'x'"):
        config.plan(["worker=x"])


def test_a_worker_is_no_setting_of_the_study(tmp_path):
    toy = ["target=tabular", "draft_model=tabular", "prompts.limit=1", "max_new_tokens=3", f"folder={tmp_path}"]
    alone, shared = config.plan(toy), config.plan([*toy, "worker=7"])
    assert alone.cells[0].fingerprint == shared.cells[0].fingerprint
    assert alone.config == shared.config
    assert "1 of 1 cells are missing" in alone.state()
    assert "acceptance length" in shared.run()
    assert "All 1 cells are done" in alone.state()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["worker=0,1", "seed=0,1"], r"over worker alone.*got more: seed=0, seed=1"),
        (["worker=range(0)"], "worker: expected at least one, got none"),
    ],
)
def test_workers_are_all_that_a_multirun_of_one_study_varies(overrides, message):
    with pytest.raises(UsageError, match=message):
        config.check_workers(overrides)
    config.check_workers(["worker=0,1,2", "experiment=temperature_sweep", "grid.seed=[0,1]"])


def test_slurm_is_asked_for_where_it_is(monkeypatch):
    monkeypatch.setattr(config.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="expected a machine that can submit to Slurm, there is no srun"):
        config.check_launcher(["hydra/launcher=slurm_gpu"])
    monkeypatch.setattr(config.shutil, "which", lambda name: f"/usr/bin/{name}")
    config.check_launcher(["hydra/launcher=slurm_gpu"])
    config.check_launcher(["hydra/launcher=submitit_local"])
