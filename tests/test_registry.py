# SPDX-License-Identifier: Apache-2.0
"""Names to classes: listing imports nothing, one bad plugin harms nobody else, and each refusal says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from stratagem.errors import PluginError
from stratagem.registry import TECHNIQUES, entries, extra_that_brings, find, strategies, techniques
from stratagem.strategy.lightning_registry import LazyStrategy, lightning_conflict, lightning_names, register_strategies

from .fake_plugins import install

GOOD = """
from lightning.pytorch.strategies import SingleDeviceStrategy
class Good(SingleDeviceStrategy):
    "A strategy that works."
"""


@pytest.fixture
def lightning_registry() -> Iterator[None]:
    """Lightning's registry as it was before the test."""
    before = dict(StrategyRegistry)
    yield
    StrategyRegistry.clear()
    StrategyRegistry.update(before)


def test_listing_shows_the_owner_and_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        monkeypatch,
        tmp_path,
        "far-away",
        strategies={"far": "far_mod:Far"},
        techniques={"far_axis": "far_mod:Axis"},
        modules={"far_mod": "raise SystemExit('imported')"},
    )
    entry = strategies()["far"]
    assert (entry.distribution, entry.version, entry.value, entry.refusal) == ("far-away", "1.0", "far_mod:Far", "")
    assert techniques()["far_axis"].kind == "technique"
    assert "far_axis" not in strategies()
    assert "far_mod" not in sys.modules
    assert list(strategies()) == sorted(strategies())
    with pytest.raises(TypeError):
        strategies()["far"] = entry  # type: ignore[index]  # the view is read-only, and this shows it


def test_selecting_imports_only_the_one_selected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        monkeypatch,
        tmp_path,
        "two",
        techniques={"one": "mod_one:One", "other": "mod_other:Other"},
        modules={"mod_one": "class One: pass", "mod_other": "class Other: pass"},
    )
    assert find("one", group=TECHNIQUES).load().__name__ == "One"
    assert "mod_other" not in sys.modules


def test_an_unknown_name_lists_the_near_ones_and_all() -> None:
    with pytest.raises(PluginError, match=r"'ring_dpp' \(did you mean ring_ddp\?\).*Allowed: .*\bfsdp\b.*ring_ddp"):
        find("ring_dpp", also=["fsdp"])


def test_a_name_claimed_twice_names_both_owners_and_breaks_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(
        monkeypatch,
        tmp_path,
        "alpha",
        techniques={"same": "mod_a:A", "mine": "mod_a:A"},
        modules={"mod_a": "class A: pass"},
    )
    install(monkeypatch, tmp_path, "beta", techniques={"same": "mod_b:B"}, modules={"mod_b": "class B: pass"})
    with pytest.raises(PluginError, match=r"claimed by alpha 1.0 \(mod_a:A\) and beta 1.0 \(mod_b:B\)"):
        techniques()["same"].load()
    assert techniques()["mine"].load().__name__ == "A"


@pytest.mark.parametrize("name", ["RingDDP", "9lives", "ring-ddp", "_x"])
def test_a_name_lightning_could_not_look_up_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "odd", techniques={name: "mod_odd:Odd"}, modules={"mod_odd": "class Odd: pass"})
    with pytest.raises(PluginError, match=r"not of the form .*lower-cases.*rename"):
        techniques()[name].load()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import deepspeed_that_is_absent.ops", r"module deepspeed_that_is_absent, .*pip install 'broken\[fast\]'"),
        ("import nobody_asks_for_this", r"pip install 'nobody_asks_for_this'"),
        ("1/0", r"ZeroDivisionError: division by zero"),
        ("class Other: pass", r"AttributeError: module 'mod_broken' has no attribute 'Broken'"),
        ("Broken = 3", r"mod_broken:Broken is int, which cannot be called"),
    ],
)
def test_a_plugin_that_cannot_be_imported_says_why(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(
        monkeypatch,
        tmp_path,
        "broken",
        techniques={"broken": "mod_broken:Broken"},
        modules={"mod_broken": source},
        requires=("deepspeed-that-is-absent>=1; extra == 'fast'",),
    )
    with pytest.raises(PluginError, match=message) as caught:
        techniques()["broken"].load()
    assert "technique 'broken' of broken 1.0" in str(caught.value)
    assert caught.value.__cause__ is not None or "int" in message


def test_a_module_that_the_entry_point_invented_is_the_plugins_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "ghost", techniques={"ghost": "ghost_mod.sub:Ghost"})
    with pytest.raises(PluginError, match=r"names the module ghost_mod.sub, which does not exist.*install ghost again"):
        techniques()["ghost"].load()


def test_the_smallest_extra_that_brings_a_module_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(
        monkeypatch,
        tmp_path,
        "many",
        requires=(
            'need-ed; extra == "all"',
            'pytest; extra == "all"',
            "need_ed>=2 ; python_version > '3' and extra == 'speed'",
            'pytest; extra == "pytest"',
            'pytest-more; extra == "pytest"',
            'pytest; extra == "less"',
            'torch; extra == "a_small_one"',
        ),
    )
    assert extra_that_brings("need_ed.sub", distribution="many") == "speed"
    assert extra_that_brings("pytest", distribution="many") == "pytest"
    assert extra_that_brings("yaml", distribution="many") == ""
    assert extra_that_brings("yaml", distribution="not-installed-at-all") == ""


def test_our_own_extra_is_found() -> None:
    assert extra_that_brings("deepspeed", distribution="stratagem") == "deepspeed"
    assert extra_that_brings("transformers", distribution="stratagem") == "transformers"


@pytest.mark.usefixtures("lightning_registry")
class TestLightning:
    """The Lightning face: names become factories."""

    def test_a_trainer_builds_the_strategy_that_it_names(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install(monkeypatch, tmp_path, "good", strategies={"good": "mod_good:Good"}, modules={"mod_good": GOOD})
        register_strategies()
        assert "mod_good" not in sys.modules
        assert StrategyRegistry["good"]["description"] == "stratagem plugin good from good 1.0"
        trainer = Trainer(strategy="good", accelerator="cpu", devices=1, logger=False)
        assert type(trainer.strategy).__name__ == "Good"
        assert isinstance(trainer.strategy, SingleDeviceStrategy)

    def test_every_registered_name_of_ours_is_there(self) -> None:
        ours = entries("stratagem.strategies")
        assert ours
        for name, entry in ours.items():
            assert StrategyRegistry[name]["strategy"] == LazyStrategy(entry)
        assert not set(ours) & set(lightning_names())

    def test_a_name_lightning_has_stays_lightnings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        before = StrategyRegistry["ddp"]
        install(monkeypatch, tmp_path, "greedy", strategies={"ddp": "g:G", "auto": "g:G"})
        register_strategies()
        assert StrategyRegistry["ddp"] is before
        assert "auto" not in StrategyRegistry
        assert "taken by DDPStrategy" in lightning_conflict(strategies()["ddp"])
        assert "meaning of its own" in lightning_conflict(strategies()["auto"])
        assert lightning_conflict(strategies()["ring_ddp"]) == ""

    def test_a_refused_name_says_why_when_a_trainer_selects_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        install(monkeypatch, tmp_path, "alpha", strategies={"same": "mod_a:A", "BadName": "mod_a:A"})
        install(monkeypatch, tmp_path, "beta", strategies={"same": "mod_b:B"})
        register_strategies()
        with pytest.raises(PluginError, match=r"alpha 1.0 .* and beta 1.0"):
            Trainer(strategy="same", accelerator="cpu", logger=False)
        with pytest.raises(PluginError, match="lower-cases"):
            Trainer(strategy="BadName", accelerator="cpu", logger=False)

    def test_what_is_no_strategy_is_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install(monkeypatch, tmp_path, "wrong", strategies={"wrong": "collections:OrderedDict"})
        register_strategies()
        with pytest.raises(PluginError, match=r"built collections.OrderedDict.*Strategy"):
            Trainer(strategy="wrong", accelerator="cpu", logger=False)


def test_importing_the_package_is_cheap_and_imports_no_plugin() -> None:
    """Seen from a fresh interpreter, where nothing is imported yet."""
    code = """if True:
        import sys
        import lightning.pytorch
        before = set(sys.modules)
        import stratagem
        new = {name for name in set(sys.modules) - before if name.startswith("stratagem")}
        from lightning.pytorch.strategies import StrategyRegistry
        assert "ring_ddp" in StrategyRegistry
        assert not any(name.startswith("stratagem.plugins") for name in sys.modules), new
        assert new == {"stratagem", "stratagem.errors", "stratagem.registry", "stratagem.strategy",
                       "stratagem.strategy.lightning_loading", "stratagem.strategy.lightning_registry"}, new
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
