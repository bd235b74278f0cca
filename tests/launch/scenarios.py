# SPDX-License-Identifier: Apache-2.0
"""Runs of a fresh process, one after another: `python -m tests.launch.scenarios [NAME ...]`.

pytest's own process may have done anything before; what forks ranks here has done nothing but imports. Each scenario
prints one line of JSON behind its name.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import importlib.util
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.utils.data import DataLoader

from stratagem.errors import ConfigError, RankError
from stratagem.models import GPT, CausalLM, GPTConfig, TextData
from stratagem.strategy import FaultTolerantCheckpointIO, launcher
from tests.launch.kit import MARK, History, Model, fail, processes, trainer

SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


# -- a rank fails ----------------------------------------------------------------------------------------------------


def _boom() -> None:
    raise ZeroDivisionError("boom")


def _user_error() -> None:
    raise ConfigError("it is 0", where="model.width", allowed="1 or more")


@scenario
def raises() -> Any:
    return fail(_boom)


@scenario
def raises_user_error() -> Any:
    return fail(_user_error)


@scenario
def is_killed() -> Any:
    return fail(lambda: os.kill(os.getpid(), signal.SIGKILL))


@scenario
def crashes() -> Any:
    return fail(lambda: ctypes.string_at(0))


@scenario
def exits() -> Any:
    return fail(lambda: os._exit(7))


@scenario
def leaves() -> Any:
    return fail(lambda: sys.exit(0))


def _sleep_for_ever() -> None:
    threading.Event().wait()


@scenario
def hangs() -> Any:
    return fail(_sleep_for_ever, timeout=1.0)


class _Forking(Model):
    """Its rank has children of its own: the workers of a loader."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(32, 64), num_workers=1)


@scenario
def is_killed_with_workers() -> Any:
    return fail(_boom, model=_Forking(lambda: os.kill(os.getpid(), signal.SIGKILL)))


@scenario
def raises_on_the_way_out() -> Any:
    class Clumsy(Callback):
        def on_exception(self, *args: Any) -> None:
            raise KeyError("a second error, of the clean-up")

    return fail(_boom, callbacks=[Clumsy()])


@scenario
def saves_on_exception() -> Any:
    """The hooks run in the ranks, where there is something to save, and not in the parent as well."""

    class Fails(Callback):
        def on_train_batch_end(self, run: Trainer, *args: Any) -> None:
            if run.global_rank == 0 and run.global_step == 2:
                _boom()

        def on_exception(self, run: Trainer, *args: Any) -> None:
            Path(folder, f"hook-{os.getpid() == parent}-{run.global_rank}").touch()

    parent = os.getpid()
    with tempfile.TemporaryDirectory() as folder:
        saving = OnExceptionCheckpoint(folder)
        result = fail(lambda: None, callbacks=[Fails(), saving], enable_checkpointing=True, default_root_dir=folder)
        saved = FaultTolerantCheckpointIO().load_checkpoint(saving.ckpt_path, weights_only=True)
        result["saved"] = saved["global_step"]
        result["hooks"] = sorted(path.name for path in Path(folder).glob("hook*"))
        return result


@scenario
def writes_a_lot_and_raises() -> Any:
    def act() -> None:
        raise ValueError("x" * 1_000_000)

    result = fail(act)
    result["length"] = len(result.pop("text"))
    result.pop("summary")
    return result


# -- all is well -----------------------------------------------------------------------------------------------------


@scenario
def comes_home() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model, history, checkpoint = Model(), History(), ModelCheckpoint(monitor="step", mode="max")
        steps = history.steps
        run = trainer(
            callbacks=[history, checkpoint],
            enable_checkpointing=True,
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            default_root_dir=folder,
        )
        before = model.layer.weight.detach().clone()
        run.fit(model)
        saved = FaultTolerantCheckpointIO().load_checkpoint(checkpoint.best_model_path, weights_only=True)["state_dict"]
        result: dict[str, Any] = {
            "moved": bool((model.layer.weight != before).any()),
            "as_saved": all(torch.equal(saved[name], value) for name, value in model.state_dict().items()),
            "global_step": run.global_step,
            "epoch": run.current_epoch,
            "status": str(run.state.status),
            "metric": float(run.callback_metrics["step"]),
            "score": float(checkpoint.best_model_score or -1),
            "seen": model.seen,
            "steps": steps,
            "trainer": history.trainer is run,
        }
        result["log"] = run.log_dir and sorted(os.listdir(run.log_dir))
        result["validated"] = run.validate(model, verbose=False)
        result["tested"] = run.test(model, ckpt_path="best", verbose=False)
        predictions = run.predict(model)
        assert predictions is not None
        result["predicted"] = [list(batch.shape) for batch in predictions]  # type: ignore[union-attr]
        run.fit_loop.max_epochs = 2
        run.fit(model)
        result["logs"] = sorted(os.listdir(Path(run.log_dir or "").parent))
        result["second_fit"] = [run.global_step, run.current_epoch, model.seen]
        result["processes"] = processes()
        result["environment"] = sorted(name for name in os.environ if name in ("LOCAL_RANK", "MASTER_PORT"))
        return result


@scenario
def here() -> Any:
    """The same twice as in `comes_home`, but in this process: what a second `fit` has to look like."""
    with tempfile.TemporaryDirectory() as folder:
        model = Model()
        run = trainer(devices=1, default_root_dir=folder)
        run.fit(model)
        run.fit_loop.max_epochs = 2
        run.fit(model)
        return [run.global_step, run.current_epoch, model.seen]


class _Late(BoringModel):
    """Builds its layer only when the run is set up, and a part that does not pickle while it runs."""

    def __init__(self, stubborn: bool = False) -> None:
        super().__init__()
        self.layer, self.stubborn = None, stubborn  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = torch.nn.Linear(32, 2)

    def on_train_start(self) -> None:
        self.noise = [float(each) for each in self.all_gather(torch.rand(1))]
        if self.stubborn:
            self.layer.lock = threading.Lock()  # type: ignore[assignment]


@scenario
def built_in_the_run() -> Any:
    """After `fit` of a module that `configure_model` builds, here and in ranks: its weights, and what is warned of."""
    alone, forked, stubborn = _Late(), _Late(), _Late(stubborn=True)
    data = DataLoader(RandomDataset(32, 8), batch_size=8)
    trainer(devices=1).fit(alone, data)
    trainer().fit(forked, data)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stratagem").addHandler(handler)
    trainer().fit(stubborn, data)
    logging.getLogger("stratagem").removeHandler(handler)
    return {
        "home": forked.layer is not None and list(forked.layer.weight.shape) == list(alone.layer.weight.shape),
        "stubborn": stubborn.layer is None,
        "logged": logged,
        "noise": forked.noise,
    }


@scenario
def losses() -> Any:
    """The `train_loss` that `CausalLM` logs in its last of three steps, with one rank and with two."""
    found = []
    for devices in (1, 2):
        torch.manual_seed(0)
        module = CausalLM(GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2, max_seq_len=16)))
        run = trainer(devices=devices, max_epochs=None, max_steps=3, limit_train_batches=None, limit_val_batches=2)
        run.fit(module, TextData(seq_len=16, global_batch=8, max_bytes=5000))
        found.append(float(run.callback_metrics["train_loss"]))
    return found


class _Logging(Model):
    """Logs something else in each kind of run, and hyperparameters while it runs."""

    def on_fit_start(self) -> None:
        assert self.logger is not None
        self.logger.log_hyperparams({"known in the run": 1})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("trained", 1.0)
        if self.current_epoch == 2:
            self.log("in the run that fails", 1.0)
        return BoringModel.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", 1.0, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", 1.0, sync_dist=True)


def _log_all_kinds(folder: str, devices: int) -> Any:
    """Runs of all kinds with one trainer, a failed one among them; the rows of every file, as what they fill."""
    model = _Logging()
    options: dict[str, Any] = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "default_root_dir": folder}
    run = trainer(devices=devices, logger=CSVLogger(folder), **options)
    assert run.logger is not None
    run.logger.log_metrics({"from outside": 0.0}, step=0)
    run.fit(model)
    run.validate(model, verbose=False)
    run.logger.log_metrics({"from outside": 1.0}, step=1)
    run.test(model, verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(model)
    run.fit_loop.max_epochs = 3
    model.on_train_end = _boom  # type: ignore[method-assign]
    with contextlib.suppress(ZeroDivisionError, RankError):
        run.fit(model)
    run.validate(model, verbose=False)
    files = {}
    for path in sorted(Path(folder).rglob("metrics.csv")):
        with path.open(newline="") as file:
            rows = [[name for name, value in row.items() if value] for row in csv.DictReader(file)]
        hparams = path.with_name("hparams.yaml")
        files[str(path.relative_to(folder))] = [*rows, hparams.exists() and hparams.read_text()]
    return files


@scenario
def metrics() -> Any:
    with tempfile.TemporaryDirectory() as forked, tempfile.TemporaryDirectory() as alone:
        return {"forked": _log_all_kinds(forked, 2), "alone": _log_all_kinds(alone, 1)}


@scenario
def tensorboard() -> Any:
    """How many bytes the event files have after a fit, and which of them after a validation; None without a writer."""
    if not any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX")):
        return None
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(logger=TensorBoardLogger(folder), log_every_n_steps=1, default_root_dir=folder)
        found = []
        for go in (run.fit, run.validate):
            go(_Logging())
            found.append({str(path): path.stat().st_size for path in Path(folder).rglob("events*")})
        return found


@scenario
def threads() -> Any:
    """The parent computes with two threads before each fork, and each rank with two as well."""
    torch.set_num_threads(2)
    os.environ["OMP_NUM_THREADS"] = "2"
    results = []
    for _ in range(5):
        product = torch.randn(1000, 1000, requires_grad=True)
        (product @ product).sum().backward()
        results.append(fail(_compute, timeout=20.0)["error"])
    return results


def _compute() -> None:
    assert torch.get_num_threads() == 2
    product = torch.randn(600, 600, requires_grad=True)
    (product @ product).sum().backward()
    torch.randn(1_000_000).exp().sum()


@scenario
def threads_are_divided() -> Any:
    """Without a word of the user, the ranks share the cores."""
    os.environ.pop("OMP_NUM_THREADS", None)
    seen = []

    class Threads(Callback):
        def __init__(self) -> None:
            self.seen = seen

        def on_train_start(self, *args: Any) -> None:
            self.seen.append(torch.get_num_threads())

    trainer(callbacks=[Threads()]).fit(Model())
    return {"seen": seen, "cores": len(os.sched_getaffinity(0))}


# -- the parent is told to stop ---------------------------------------------------------------------------------------


def stop(signum: int, model: BoringModel | None = None) -> Any:
    """Send a signal to a process that is in the middle of a run; what became of it and of its ranks?"""
    ready, steady = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 3
        try:
            long = trainer(max_epochs=-1, limit_train_batches=10, callbacks=[History(), _Told(steady)])
            long.fit(model or Model())
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            os._exit(code)
    os.close(steady)
    os.read(ready, 1)
    began = time.monotonic()
    os.kill(pid, signum)
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    while (left := processes()) and time.monotonic() - began < 8:
        time.sleep(0.05)
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "gone": time.monotonic() - began,
        "processes": left,
    }


class _Told(Callback):
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def on_train_batch_end(self, run: Trainer, *args: Any) -> None:
        if run.global_step == 5 and run.global_rank == 1:
            os.write(self.descriptor, b"x")


@scenario
def interrupted() -> Any:
    return stop(signal.SIGINT)


@scenario
def terminated() -> Any:
    return stop(signal.SIGTERM)


@scenario
def parent_killed() -> Any:
    return stop(signal.SIGKILL)


# -- the start -------------------------------------------------------------------------------------------------------


@scenario
def choices() -> Any:
    cases: dict[str, dict[str, Any]] = {
        "auto": {},
        "warm": {"launcher": "warm"},
        "cold": {"launcher": "subprocess"},
        "one": {"devices": 1},
        "several_hosts": {"num_nodes": 2},
        "warm_on_several_hosts": {"launcher": "warm", "num_nodes": 2},
    }
    found: dict[str, Any] = {name: _choice(**case) for name, case in cases.items()}
    os.environ["LOCAL_RANK"] = "0"  # as if somebody else had started this process as a rank
    found["external"] = _choice()
    del os.environ["LOCAL_RANK"]
    with mock.patch.object(launcher, "fork_obstacle", return_value="a reason"):
        found["unsafe_warm"] = fail(lambda: None, launcher="warm")["text"]
        run = trainer()
        with mock.patch.object(_SubprocessScriptLauncher, "launch", return_value="cold start"):
            assert isinstance(run.strategy.launcher, launcher.WarmLauncher)
            found["unsafe_auto"] = [run.strategy.launcher.launch(lambda: None, trainer=run)]
        found["unsafe_auto"].append(type(run.strategy.launcher).__name__)
    return found


def _choice(**case: Any) -> str:
    try:
        return type(trainer(**case).strategy.launcher).__name__
    except ConfigError as error:
        return str(error)


@scenario
def start() -> Any:
    """Seconds from the call of `fit` to the first training step on rank 0, three times."""
    seconds = []
    for _ in range(3):
        model = Model()
        began = time.monotonic()
        trainer().fit(model)
        seconds.append(model._began - began)
    return seconds


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with launcher._store():
        pass  # the first store of a process opens a pipe for good, which is not a leak of a run
    for name in names or [name for name in SCENARIOS if name != "start"]:
        print(json.dumps([name, SCENARIOS[name]()]), flush=True)


if __name__ == "__main__":
    if MARK not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, MARK: str(os.getpid())})
    main(sys.argv[1:])
