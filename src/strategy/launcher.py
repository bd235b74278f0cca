# SPDX-License-Identifier: Apache-2.0
"""How ranks are started.

    who started this process            auto                     warm             subprocess
    torchrun, SLURM, MPI, LSF           taken as it is           (the same)       (the same)
    the user, one device                runs here                runs here        runs here
    the user, CPU devices, one host     warm where it is safe    forked           fresh start of the script
    the user, GPUs or several hosts     subprocess               refused          fresh start of the script

`warm` forks the ranks from this process, which has imported everything and built the module: a start takes a fraction
of a second where a fresh interpreter per rank takes many. This process is then no rank: it watches (`supervisor`),
hosts the store at which the ranks meet, and takes home what rank 0 brings (`homecoming`). `fork_safety` says when a
fork is safe.

What differs for the user of `warm`: an object that hangs neither on the module nor on a callback is not changed by the
run; and after `fit` this process holds no optimizers, so saving a checkpoint belongs into the run, to a
`ModelCheckpoint`. Under every launcher `predict` returns the predictions of rank 0's share of the data; a
`BasePredictionWriter` keeps all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import IO, Any, Literal, final

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parameter import is_lazy
from typing_extensions import override

from stratagem.errors import ConfigError, RankError, UserError
from stratagem.strategy.fork_safety import fork_obstacle, threads_per_rank
from stratagem.strategy.homecoming import Homecoming
from stratagem.strategy.rank_process import Rank, describe
from stratagem.strategy.supervisor import supervised

LauncherName = Literal["auto", "warm", "subprocess"]

_ABOVE_THE_WORK = True  # frames of this file are left out of a rank's traceback
_DEFAULT_TIMEOUT = timedelta(minutes=30)

log = logging.getLogger(__name__)


def make_launcher(strategy: ParallelStrategy, name: LauncherName) -> _Launcher | None:
    """The launcher that starts the ranks of `strategy`, or None where this process is the only rank.

    Args:
        strategy: knows its devices, hosts and cluster environment.
        name: what the user asked for.

    Raises:
        ConfigError: `warm` cannot be had here.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    num_ranks, num_hosts = len(strategy.parallel_devices or ()), getattr(strategy, "num_nodes", 1)
    cold = _SubprocessScriptLauncher(environment, num_ranks, num_hosts)
    if environment.creates_processes_externally:
        return cold  # it checks that the numbers agree, and starts nothing
    if num_hosts == 1 and num_ranks == 1:
        return None
    obstacle = _obstacle(strategy)
    if name == "warm" and obstacle is not None:
        raise _refusal(obstacle)
    return cold if name == "subprocess" or obstacle is not None else WarmLauncher(strategy, name)


def _obstacle(strategy: ParallelStrategy) -> str | None:
    """What keeps ranks from being forked whatever this process does until then."""
    if getattr(strategy, "num_nodes", 1) > 1:
        return "the ranks are on several hosts"
    if not isinstance(strategy.cluster_environment, LightningEnvironment):
        return f"{type(strategy.cluster_environment).__name__} starts processes in its own way"
    kinds = {device.type for device in strategy.parallel_devices or ()}
    if kinds != {"cpu"}:
        return f"the devices are {', '.join(sorted(kinds))}, and only CPU ranks are forked"
    if sys.platform != "linux":
        return f"ranks are forked on Linux only, and this is {sys.platform}"
    return None


def _refusal(obstacle: str) -> ConfigError:
    return ConfigError(
        f"ranks cannot be forked here: {obstacle}",
        where="run.launcher",
        allowed="subprocess, or auto in a script",
        do="leave launcher out, or start ranks from a fresh process",
    )


@final
class WarmLauncher(_Launcher):
    """Forks one rank per device from this process and watches them.

    Args:
        strategy: whose ranks.
        name: `warm` refuses where a fork turns out to be unsafe, `auto` starts subprocesses instead.
    """

    def __init__(self, strategy: ParallelStrategy, name: LauncherName) -> None:
        self._strategy, self._name = strategy, name
        self._kill: Callable[[int], None] | None = None

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` on every rank; returns what it returned on rank 0.

        Args:
            function: the work.
            args: its arguments; each rank has its own copy.
            trainer: the one whose objects are brought up to date afterwards.
            kwargs: its keyword arguments.

        Raises:
            UserError: of the rank that raised it.
            RankError: a rank failed in another way, named with its own traceback.
            SystemExit: with 130 after Ctrl-C and 143 after SIGTERM.
        """
        num_ranks = len(self._strategy.parallel_devices or ())
        num_threads = threads_per_rank(num_ranks)
        obstacle = fork_obstacle(num_threads)
        if obstacle is not None:
            return self._launch_cold(obstacle, function, *args, trainer=trainer, **kwargs)
        timeout = getattr(getattr(self._strategy, "run", None), "timeout", _DEFAULT_TIMEOUT)
        with tempfile.TemporaryFile() as file, supervised(num_ranks, timeout) as supervisor:
            home = Homecoming(trainer, file) if trainer is not None else None
            work = functools.partial(function, *args, **kwargs)
            supervisor.start(functools.partial(self._run, work, trainer, home, file, num_threads))
            self._kill = supervisor.kill
            try:
                with _store() as port:  # after the fork, so that no rank holds a socket or a thread of it
                    supervisor.tell(port)
                    supervisor.wait()
            except (RankError, SystemExit) as error:
                if trainer is not None:
                    _hooks_have_run(trainer)
                raise _unwrapped(error) from None
            finally:
                self._kill = None
            return home.unpack() if home is not None else _load(file)

    @override
    def kill(self, signum: int) -> None:
        """Send every rank a signal."""
        if self._kill is not None:
            self._kill(signum)

    def _launch_cold(self, obstacle: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._name == "warm" or _IS_INTERACTIVE:  # a notebook is no script that could be started afresh
            raise _refusal(obstacle)
        log.warning("Ranks are started as fresh processes, which takes longer than a fork: %s.", obstacle)
        environment = self._strategy.cluster_environment
        assert environment is not None
        launcher = _SubprocessScriptLauncher(environment, len(self._strategy.parallel_devices or ()), 1)
        self._strategy._launcher = launcher
        return launcher.launch(function, *args, **kwargs)

    def _run(
        self,
        work: Callable[[], Any],
        trainer: Trainer | None,
        home: Homecoming | None,
        file: IO[bytes],
        num_threads: int,
        rank: Rank,
        port: int,
    ) -> None:
        """In a rank: become one as torchrun would have made it, then do the work as Lightning does it in place."""
        _become_rank(rank.number, len(self._strategy.parallel_devices or ()), port, num_threads)
        environment = self._strategy.cluster_environment
        assert isinstance(environment, LightningEnvironment)
        environment._main_port = port  # it may remember the port of an earlier run
        self._strategy._launcher = None
        if home is None:
            results = work()
            if rank.number == 0:
                torch.save(results, file)
                file.flush()
            return
        assert trainer is not None
        _own_memory(trainer.lightning_module)
        _own_randomness(rank.number)
        home.watch(collects=rank.number == 0)
        _agree_on_sigterm(trainer)
        results = _call_and_handle_interrupt(trainer, functools.partial(_told, work, rank))
        if rank.number == 0:
            home.pack(results)


def _told(work: Callable[[], Any], rank: Rank) -> Any:
    """Do the work; tell the parent of a failure at once, before hooks and teardown that may take long or fail too."""
    try:
        return work()
    except _TunerExitException:
        raise  # how Lightning's tuner ends a run
    except BaseException as error:
        rank.report(describe(error))
        raise


def _become_rank(number: int, num_ranks: int, port: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    os.environ.update(
        LOCAL_RANK=str(number),
        NODE_RANK="0",
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is hosted by the parent, as by torchrun's agent
        OMP_NUM_THREADS=str(num_threads),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank_zero_only.rank = number  # type: ignore[attr-defined]


def _own_randomness(number: int) -> None:
    """Ranks inherit one random state; unless the user has seeded it, each gets its own, as fresh processes have."""
    if "PL_GLOBAL_SEED" not in os.environ and number > 0:
        seed = (torch.initial_seed() + number) % 2**32
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # the state that users' data pipelines draw from


def _own_memory(module: LightningModule) -> None:
    """Tensors in shared memory would be one and the same on all ranks; give this rank its own."""
    parts: list[nn.Module] = list(module.modules())
    for part in parts:
        for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            if not is_lazy(tensor) and tensor.is_shared():
                tensor.data = tensor.data.clone()


def _agree_on_sigterm(trainer: Trainer) -> None:
    """Let SIGTERM end a fit on all ranks at the same batch, wherever it arrives first; anything else at once.

    Lightning's handler broadcasts, from within the signal handler: a rank that is in the handler waits for rank 0,
    which may wait in a collective for that rank. Here the handler takes a note, and the one collective that Lightning
    runs before each training batch for this purpose becomes a vote.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    votes = hasattr(loop, "_broadcast_sigterm_tensor")
    noted: list[int] = []

    def note(signum: int, frame: Any) -> None:
        noted.append(signum)
        if trainer.state.fn != TrainerFn.FITTING:
            raise SystemExit(128 + signum)
        connector.received_sigterm = not votes

    def vote() -> None:
        stop = torch.tensor(len(noted))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            connector.received_sigterm = True
            raise SIGTERMException

    connector._sigterm_notifier_fn = note  # type: ignore[method-assign, assignment]
    loop._broadcast_sigterm_tensor = vote  # type: ignore[method-assign]


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """Host the store at which the ranks meet, on a loopback port that the kernel picks; yields the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port: int = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield port
    finally:
        del store


def _load(file: IO[bytes]) -> Any:
    file.seek(0)
    return torch.load(file, weights_only=False)  # written by our own child


def _hooks_have_run(trainer: Trainer) -> None:
    """Keep Lightning from running the `on_exception` hooks here too.

    The ranks have run them, where there was something to save. Lightning calls the strategy's own after those of the
    callbacks: then they are put back.
    """
    owner: Any = trainer  # which does not declare its callbacks
    callbacks, strategy = owner.callbacks, trainer.strategy

    def put_back(exception: BaseException) -> None:
        owner.callbacks = callbacks
        del strategy.on_exception

    owner.callbacks = []
    strategy.on_exception = put_back  # type: ignore[method-assign]


def _unwrapped(error: BaseException) -> BaseException:
    """What the user has done wrong is raised as if it had been found here; all else names its rank."""
    cause = error.cause if isinstance(error, RankError) else None
    return cause if isinstance(cause, UserError | MisconfigurationException) else error
