# SPDX-License-Identifier: Apache-2.0
"""What is looked at in a rank, in batches and state dicts of every kind; and how a run is changed for a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from stratagem.comparison.conductor import _loosened
from stratagem.comparison.contender import Override, _train_with_sgd, changed
from stratagem.comparison.observation import Sketcher, batch_hash, num_rows
from stratagem.comparison.results import Reference
from stratagem.comparison.running import _address

ROWS = torch.arange(12.0).reshape(4, 3)


class _Strange(torch.Tensor):
    """Of a class that lets nobody see its bytes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("detach", "cpu", "contiguous", "reshape"):
            raise TypeError("not this one")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda factor: (ROWS * factor).to_sparse(),
        lambda factor: (ROWS * factor).to_sparse_csr(),
        lambda factor: torch.nested.nested_tensor([torch.ones(n + 1) * factor for n in range(4)]),
        lambda factor: torch.nested.nested_tensor([torch.ones(n + 1) * factor for n in range(4)], layout=torch.jagged),
        lambda factor: torch.nested.nested_tensor([torch.ones(n + 1) * factor for n in range(2)]),
    ],
    ids=["sparse", "csr", "nested", "jagged", "of another length"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_batch_of_any_layout_has_a_fingerprint(make: Any) -> None:
    one, same, other = ([ROWS, make(factor)] for factor in (1.0, 1.0, 2.0))
    assert batch_hash(one) == batch_hash(same) != batch_hash(other)
    assert num_rows([make(1.0)]) in (2, 4)


def test_what_lets_nobody_look_ends_no_run() -> None:
    strange = torch.ones(4, 3).as_subclass(_Strange)
    assert batch_hash([ROWS, strange]) == batch_hash([ROWS, strange])
    assert batch_hash([ROWS, strange]) != batch_hash([ROWS + 1, strange])


def test_elements_that_are_no_numbers_hide_none_that_are() -> None:
    """A causal mask, and one parameter beside it that is off; another mask is another tensor."""
    mask = torch.full((4, 4), -math.inf).triu(1)
    off = mask.clone()
    off[3, 0] = 1e-3
    moved = torch.full((4, 4), -math.inf).triu(2)
    sketcher = Sketcher()
    one, same, near, other = (sketcher.sketch({"mask": each})["mask"] for each in (mask, mask, off, moved))
    assert one == same
    assert 1e-4 < near.distance(one) < 1e-2
    assert math.isinf(other.distance(one))
    assert math.isinf(sketcher.sketch({"mask": -mask})["mask"].distance(one))
    assert all(math.isfinite(each) for each in (one.norm, *one.products))


class _Module(LightningModule):
    def __init__(self, found: Any, *, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.found = automatic, found

    def configure_optimizers(self) -> Any:
        return self.found


def _warm() -> tuple[torch.optim.Optimizer, LambdaLR]:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.1}, {"params": [second]}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, step / 100))


def test_sgd_has_the_rates_that_are_meant_and_not_those_of_a_warm_up() -> None:
    optimizer, schedule = _warm()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    module = _Module({"optimizer": optimizer, "lr_scheduler": schedule})
    _train_with_sgd(module)
    swapped: Any = module.configure_optimizers()
    assert [(group["lr"], group["weight_decay"]) for group in swapped.param_groups] == [(0.5, 0.1), (0.25, 0.01)]

    lazy = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    lazy.param_groups[0]["lr"] = None
    module = _Module(lazy)
    _train_with_sgd(module)
    swapped = module.configure_optimizers()
    assert swapped.param_groups[0]["lr"] > 0

    # A module that steps its schedules itself finds as many of them, and they change nothing.
    optimizer, schedule = _warm()
    module = _Module(([optimizer], [schedule]), automatic=False)
    _train_with_sgd(module)
    (swapped,), (constant,) = module.configure_optimizers()
    swapped.step()
    constant.step()
    assert [group["lr"] for group in swapped.param_groups] == [0.5, 0.25]


def test_what_asks_for_the_last_epoch_keeps_it() -> None:
    averaging = StochasticWeightAveraging(1e-3)
    given = {"max_epochs": 3, "callbacks": [averaging, EarlyStopping("nothing")]}
    found = changed(given, conductor=Callback(), override=Override(10), alone=False)
    assert (found["max_epochs"], found["callbacks"][1:]) == (3, [averaging])
    found = changed({"max_epochs": 3}, conductor=Callback(), override=Override(10), alone=False)
    assert found["max_epochs"] == -1
    found["logger"].experiment.add_scalar("any", 1.0)  # a module may speak to its own


def test_a_schedule_that_waits_for_the_validation_goes_without_it_and_that_is_said() -> None:
    optimizer, schedule = _warm()
    waits = LRSchedulerConfig(ReduceLROnPlateau(optimizer), monitor="val_loss", reduce_on_plateau=True)
    trainer: Any = SimpleNamespace(lr_scheduler_configs=[waits, LRSchedulerConfig(schedule)])
    (note,) = _loosened(trainer)
    assert not waits.strict
    assert "ReduceLROnPlateau waits for val_loss" in note


def test_clipping_that_never_acts_is_known() -> None:
    norms = (0.5, None, 2.0)
    assert Reference((), norms, clip=2.5).unclipped
    assert not Reference((), norms, clip=1.0).unclipped
    assert not Reference((), norms).unclipped
    assert not Reference((), (None,), clip=1.0).unclipped


def test_a_socket_in_a_folder_of_a_long_name_has_a_name_that_is_no_file(tmp_path: Path) -> None:
    assert _address(Path("/tmp/a")) == "/tmp/a/s"
    long = tmp_path / ("x" * 100)
    assert _address(long).startswith("\0")
    assert _address(long) != _address(long)
