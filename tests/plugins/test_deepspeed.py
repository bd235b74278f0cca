# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed behind our face: what it refuses, what it leaves alone, and that it trains what one process trains."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import override

from stratagem.errors import CommunicationError, ConfigError, PluginError
from stratagem.plugins.deepspeed import DeepSpeedSettings, DeepSpeedZero2Strategy, host
from stratagem.plugins.deepspeed.arrivals import bounded
from stratagem.plugins.deepspeed.settings import engine_config
from stratagem.strategy.settings import RunSettings
from stratagem.testing.ranks import RanksFailed, run_ranks

needs_deepspeed = pytest.mark.skipif(bool(host.missing()), reason="the extra deepspeed is not installed")


class Odd(LightningModule):
    """Frozen, tied, unused and alternating parameters, the same on all ranks; a schedule per step."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.odd, self.unused = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.into, self.out = nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.contiguous())
        self.again = nn.Linear(6, 5, bias=False)
        self.again.weight = self.into.weight

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.frozen(batch))
        if batch_idx % 2:
            hidden = hidden + self.odd(hidden)
        return F.mse_loss(self.out(self.into(hidden) + torch.tanh(self.again(hidden))), batch[:, :6])

    @override
    def configure_optimizers(self) -> Any:
        optimizer = Adam([p for p in self.parameters() if p.requires_grad], lr=0.05)
        schedule = LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class Read:
    """Norms before the step, rates, and on rank 0 the whole parameters after each micro-batch."""

    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)


class Reader(Callback):
    """Writes it down."""

    def __init__(self) -> None:
        self.found = Read()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "gradient_norm"):
            self.found.norms.append(strategy.gradient_norm(optimizer))
        else:
            squares = [p.grad.square().sum() for p in pl_module.parameters() if p.grad is not None]
            self.found.norms.append(float(torch.stack(squares).sum().sqrt()))
        self.found.rates.append(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.global_rank == 0:
            self.found.states.append({name: value.detach().clone() for name, value in state.items()})


def fit(
    name: str | None,
    module: type[LightningModule] = Odd,
    timeout: timedelta = timedelta(seconds=30),
    **options: Any,
) -> Read:
    """Three batches of 8 samples and one of 3, two to a step; on this gang's ranks, or in one process."""
    from stratagem.strategy.lightning_registry import register_strategies

    register_strategies()
    seed_everything(1, verbose=False)
    strategy: Any = SingleDeviceStrategy("cpu")
    if name is not None:
        from stratagem.registry import find

        strategy = find(name).load()(run=RunSettings(batch_size="global", timeout=timeout))
    reader = Reader()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        **{
            **dict.fromkeys(quiet, False),
            "precision": "64-true",
            "gradient_clip_val": 0.2,
            "accumulate_grad_batches": 2,
            **options,
        },
        accelerator="cpu",
        devices=1 if name is None else int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        callbacks=[reader],
    )
    data = torch.randn(27, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    trained = module()
    before = [set(vars(each)) for each in trained.children()]
    trainer.fit(trained, DataLoader(data, batch_size=8, shuffle=False))
    assert [set(vars(each)) for each in trained.children()] == before, "DeepSpeed has left its own on the modules"
    return reader.found


def all_stages() -> dict[str, Read]:
    """The body of every rank."""
    return {f"deepspeed_zero_{stage}": fit(f"deepspeed_zero_{stage}") for stage in (1, 2, 3)}


@needs_deepspeed
def test_every_stage_trains_what_one_process_trains() -> None:
    """Adam, a schedule per step, clipping, accumulation, an uneven last batch; parameters after each micro-batch."""
    one = run_ranks(1, fit, {"name": None}, group=False, deadline=timedelta(seconds=60))[0]
    ranks = run_ranks(2, all_stages, {}, deadline=timedelta(seconds=90))
    assert min(one.norms) > 0.2, "nothing was clipped"
    for name in ranks[0]:
        for found in (each[name] for each in ranks):
            assert found.norms == pytest.approx(one.norms, rel=1e-10), name
            assert found.rates == one.rates, f"{name}: the schedule did not step once per step"
        for mine, theirs in zip(ranks[0][name].states, one.states, strict=True):
            assert list(mine) == list(theirs)
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=1e-9, atol=1e-10, msg=f"{name}: {key}")


class Branches(Odd):
    """Rank 1 alone takes the branch `odd`, of which rank 0 has never heard."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, self.global_rank)


class Sided(Odd):
    """Rank 1 alone takes another branch, whose modules are as large: what rank 0 fetches there fits."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        branch = self.right if self.global_rank == 1 else self.left
        return super().training_step(batch, 0) + branch(batch[:, :6]).square().mean()


def fail_in_branches(stage: int, module: type[LightningModule]) -> str:
    """The body of every rank: how the run ended."""
    try:
        fit(f"deepspeed_zero_{stage}", module, timeout=timedelta(seconds=4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


@needs_deepspeed
@pytest.mark.slow
def test_branches_that_differ_between_ranks_end_in_an_error() -> None:
    """Stages 1 and 2 at once, on every rank; stage 3 when a fetch does not fit, or the timeout is over."""
    within = {"group": False, "deadline": timedelta(seconds=60)}
    for stage in (1, 2):
        for end in run_ranks(2, fail_in_branches, {"stage": stage, "module": Branches}, **within):
            assert end.startswith("ConfigError: Branches: parameters got gradients on some ranks only"), end
    try:
        ends = run_ranks(2, fail_in_branches, {"stage": 3, "module": Sided}, **within)
    except RanksFailed as error:  # Gloo aborts a process that gets more than it expects
        ends = [f"Error: {failure.exitcode}" for failure in error.failures.values()]
        assert set(ends) == {f"Error: {-signal.SIGABRT}"}, error  # noqa: PT017  # one of two right ends
    assert all("Error: " in end for end in ends), ends


def test_a_collective_that_waits_too_long_says_what_that_may_mean() -> None:
    said = r"dp_shard: .*deepspeed_zero_3.*\(0:00:04\).*use zero_1"
    with pytest.raises(CommunicationError, match=said), bounded(3, timedelta(seconds=4)):
        raise RuntimeError("[unbound_buffer.cc:129] Timed out waiting 4000ms for recv operation to complete")
    with pytest.raises(RuntimeError, match="Connection closed"), bounded(3, timedelta(seconds=4)):
        raise RuntimeError("Connection closed by peer")


class Manual(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Odd):
    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class TwoOptimizers(Odd):
    @override
    def configure_optimizers(self) -> Any:
        return [Adam(self.into.parameters()), Adam(self.odd.parameters())]


class Grows(Odd):
    @override
    def on_train_start(self) -> None:
        self.late = nn.Linear(2, 2)


class Thaws(Odd):
    @override
    def on_train_start(self) -> None:
        self.frozen.requires_grad_(True)


def refusals() -> list[str]:
    """The body of one rank: what each module or Trainer is told."""
    found = []
    for module, options in (
        (Manual, {"gradient_clip_val": None, "accumulate_grad_batches": 1}),
        (OwnBackward, {}),
        (TwoOptimizers, {}),
        (Grows, {}),
        (Thaws, {}),
        (Odd, {"gradient_clip_algorithm": "value"}),
    ):
        try:
            fit("deepspeed_zero_2", module, **options)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(f"{module.__name__} {options} was not refused")
    return found


@needs_deepspeed
def test_what_the_engine_would_ignore_is_refused() -> None:
    manual, backward, two, grows, thaws, by_value = run_ranks(1, refusals, {}, deadline=timedelta(seconds=60))[0]
    assert "automatic_optimization" in manual
    assert backward.startswith("ConfigError: OwnBackward.backward")
    assert "multiple optimizers" in two
    assert "late.weight is new" in grows
    assert "frozen.weight is trained now" in thaws
    assert by_value.startswith("ConfigError: trainer.gradient_clip_algorithm")


def test_settings_that_contradict_each_other_are_refused() -> None:
    for config in ({"train_batch_size": 8}, {"zero_optimization": {"stage": 1}}, {"bf16.enabled": True}):
        with pytest.raises(ConfigError, match="is decided elsewhere"):
            DeepSpeedSettings(config=config)
    with pytest.raises(ConfigError, match="bucket_mib is 0"):
        DeepSpeedSettings(bucket_mib=0)
    settings = DeepSpeedSettings(config={"zero_optimization.round_robin_gradients": True, "steps_per_print": 7})
    made = engine_config(settings, 2, "bf16-true")
    assert made["zero_optimization"]["round_robin_gradients"] is True
    assert (made["zero_optimization"]["stage"], made["steps_per_print"], made["bf16"]) == (2, 7, {"enabled": True})
    with pytest.raises(ConfigError, match="transport is p2p"):
        DeepSpeedZero2Strategy(run=RunSettings(transport="p2p"))


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else theirs(name, *rest)
    )
    with pytest.raises(PluginError, match=r"not installed.*pip install 'stratagem\[deepspeed\]'"):
        DeepSpeedZero2Strategy()
    assert "not installed" in DeepSpeedZero2Strategy.unavailable()


@needs_deepspeed
@pytest.mark.slow
def test_nothing_imports_deepspeed_before_it_is_used_and_a_fork_stays_safe() -> None:
    """Neither the package, nor the table, nor a page, nor the strategy itself; and its import starts no thread."""
    code = """
import os, sys
from stratagem.cli import main
main(["strategies"]); main(["explain", "deepspeed_zero_2"])
from stratagem.plugins.deepspeed import DeepSpeedZero2Strategy, host
DeepSpeedZero2Strategy()
assert "deepspeed" not in sys.modules
threads = len(os.listdir("/proc/self/task"))  # numpy's linear algebra may have its own
host.load("cpu")
from stratagem.strategy.fork_safety import fork_obstacle
assert fork_obstacle(2) is None, fork_obstacle(2)
assert len(os.listdir("/proc/self/task")) == threads
assert "DS_ACCELERATOR" not in os.environ
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
