# SPDX-License-Identifier: Apache-2.0
"""The configs: each is right, each registered name has its overlay, and only the strategy tells two runs apart."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from torch import nn

from stratagem import config
from stratagem.cli._run import RunCLI
from stratagem.registry import strategies

FOLDER = Path(__file__).parent.parent / "configs"
RUNS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
OURS = sorted(name for name, entry in strategies().items() if entry.distribution == "stratagem")
EXTRAS = {"llama_tiny": "transformers"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Runs are built, not run; nothing is written into the project."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", lambda self, **kwargs: None)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def words(run: str, *overlays: str) -> list[str]:
    """The options that name a run and strategies on top of it."""
    paths = [FOLDER / f"{run}.yaml", *(FOLDER / "strategy" / f"{name}.yaml" for name in overlays)]
    return [word for path in paths for word in ("--config", str(path))]


def resolved(run: str, *overlays: str) -> dict[str, Any]:
    """All that the parser makes of it, defaults included."""
    values: dict[str, Any] = RunCLI(["fit", *words(run, *overlays)]).config.fit.as_dict()
    values.pop("config")  # which files were read
    return values


def needs_extra(run: str) -> None:
    """Skips where an optional package is missing."""
    if run in EXTRAS:
        pytest.importorskip(EXTRAS[run], reason=f"configs/{run}.yaml needs the extra {EXTRAS[run]}")


def test_every_name_has_an_overlay_and_every_overlay_a_name() -> None:
    assert OURS
    assert sorted(path.stem for path in (FOLDER / "strategy").glob("*.yaml")) == OURS


@pytest.mark.parametrize("name", OURS)
def test_an_overlay_sets_the_strategy_and_nothing_else(name: str) -> None:
    file = FOLDER / "strategy" / f"{name}.yaml"
    values = yaml.safe_load(file.read_text())
    assert list(values) == ["trainer"]
    assert list(values["trainer"]) == ["strategy"]
    named = values["trainer"]["strategy"]
    class_path = strategies()[name].value.replace(":", ".")
    assert named == name or named["class_path"] == class_path
    assert len(file.read_text().splitlines()) <= 10


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", OURS)
def test_every_run_under_every_strategy_is_without_error(run: str, name: str) -> None:
    needs_extra(run)
    form, meaning = config.check(config.read(words(run, name)), "fit")
    assert [*form, *meaning] == []


@pytest.mark.parametrize("name", OURS)
def test_every_option_of_a_strategy_can_be_given(name: str) -> None:
    """Each by its own default, all on one command line, to the check and to the parser of the run."""
    options = []
    for parameter in inspect.signature(strategies()[name].load()).parameters.values():
        if dataclasses.is_dataclass(parameter.default):
            for field in dataclasses.fields(parameter.default):
                value = getattr(parameter.default, field.name)
                word = "null" if value is None else str(value).lower()
                options.append(f"--trainer.strategy.{parameter.name}.{field.name}={word}")
    assert options
    given = [*words("gpt_tiny"), f"--trainer.strategy={name}", *options]
    form, meaning = config.check(config.read(given), "fit")
    assert [*form, *meaning] == []
    assert type(RunCLI(["fit", *given]).trainer.strategy) is strategies()[name].load()


@pytest.mark.parametrize("run", RUNS)
def test_a_run_says_all_but_the_strategy(run: str) -> None:
    values = yaml.safe_load((FOLDER / f"{run}.yaml").read_text())
    assert "strategy" not in values["trainer"]
    assert (values["trainer"]["accelerator"], values["trainer"]["devices"]) == ("cpu", 2)


@pytest.mark.parametrize("name", OURS)
def test_two_runs_differ_in_the_strategy_alone(name: str) -> None:
    plain, changed = resolved("gpt_tiny"), resolved("gpt_tiny", name)
    assert plain["trainer"].pop("strategy") == "auto"
    assert changed["trainer"].pop("strategy") == name
    assert plain == changed


def test_the_models_have_the_sizes_that_the_files_tell() -> None:
    def num_parameters(run: str) -> int:
        model: nn.Module = RunCLI(["fit", *words(run)]).model
        return sum(parameter.numel() for parameter in model.parameters())

    assert 500_000 < num_parameters("gpt_tiny") < 1_000_000
    norms = [m for m in RunCLI(["fit", *words("vision_tiny")]).model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms, "the run with BatchNorm has none"


def test_the_llama_is_a_llama() -> None:
    needs_extra("llama_tiny")
    assert type(RunCLI(["fit", *words("llama_tiny")]).model.model).__name__ == "LlamaForCausalLM"
