# SPDX-License-Identifier: Apache-2.0
"""`MeshStrategy`: the one class that faces Lightning.

A strategy of ours is a mesh with one technique per axis. This base class turns Lightning's calls into theirs and closes
Lightning's traps in one place:

    setup_environment   process group, mesh, context; from here on ranks can talk
    setup               precision, batch norm over ranks, techniques in order, optimizers
    training_step ...   the user's own methods, on the user's own module: nothing is wrapped
    backward            weigh the loss, begin, backward, finish
    optimizer_step      the norm and the clipping come from placements
    teardown            techniques, communicators, process group; aborted, not closed, after an error

Note [a rank's share of the mean]: the mean over ranks of the ranks' mean losses is the mean over samples only if all
ranks have as many. In the last, uneven batch they have not, so each rank's loss is multiplied by `samples here * ranks
/ samples in all` before backward; the factor is arithmetic, nothing is sent for it.

Note [nothing to do]: a closure that runs no backward on this rank still meets the other ranks, with zeros for
gradients, instead of leaving them waiting. (A training step that returns None is refused by Lightning itself.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _sync_ddp,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from stratagem.mesh import MeshShape
from stratagem.placement import Placement, clip_by_norm, global_norm
from stratagem.strategy.launcher import make_launcher
from stratagem.strategy.loaders import LoaderOrder
from stratagem.strategy.plain_state import PlainState
from stratagem.strategy.rendezvous import Rendezvous
from stratagem.strategy.settings import RunSettings
from stratagem.strategy.sync_batchnorm import convert_batchnorm, restore_batchnorm
from stratagem.technique import Context, DataTechnique, Technique


class MeshStrategy(PlainState, ABC):
    """Base of every strategy whose techniques live on a mesh.

    A subclass says which techniques there are and how the world is divided; it writes nothing that faces Lightning.

    Args:
        run: timeouts, transport, launcher, the meaning of `batch_size`.
    """

    def __init__(self, run: RunSettings = RunSettings()) -> None:
        super().__init__()
        self.run = run
        self.context: Context | None = None
        self._num_nodes = 1
        self._techniques: list[Technique] = []
        self._loaders: LoaderOrder | None = None
        self._owns_group = self._failed = False

    # -- what a subclass says --------------------------------------------------------------------------------------

    @abstractmethod
    def mesh_shape(self, world_size: int) -> MeshShape:
        """How `world_size` ranks are divided. Pure: called before any process starts, to refuse what cannot be.

        Raises:
            MeshError: the axes do not fit.
        """

    @abstractmethod
    def make_techniques(self) -> list[Technique]:
        """Fresh techniques in the order in which they are applied, at most one of them a `DataTechnique`, the last."""

    # -- who and where ---------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Without this Lightning silently ignores `sync_dist` and leaves samplers alone."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Machines; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def shape(self) -> MeshShape:
        """The mesh of this run."""
        return self.context.shape if self.context else self.mesh_shape(self.num_nodes * self.num_processes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data coordinates, not the world's: ranks that differ only in tp, pp or cp read the same samples."""
        return {"num_replicas": self.shape.data_size, "rank": self.shape.data_rank(self.global_rank)}

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's rank-zero helpers who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # set on a function

    # -- start and end ---------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert isinstance(environment, ClusterEnvironment)
        self.mesh_shape(self.num_nodes * self.num_processes)  # refuse before any process starts
        self._launcher = make_launcher(self, self.run.launcher)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._owns_group, self._failed = not dist.is_initialized(), False
        if self._owns_group:
            assert self.cluster_environment is not None
            backend = self.run.backend or _get_default_process_group_backend_for_device(self.root_device)
            device = None if self.root_device.type == "cpu" else self.root_device
            Rendezvous.open(self.cluster_environment, backend, timeout=self.run.timeout, device=device)
        self.context = Context(
            self.mesh_shape(self.world_size),
            self.global_rank,
            self.root_device,
            transport=self.run.transport,
            timeout=self.run.timeout,
        )
        assert self.lightning_module is not None
        self._loaders = LoaderOrder(self, self.lightning_module.trainer, self.run.batch_size)
        self._join_crew()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        assert self.context is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting and self._layer_sync is not None:
            convert_batchnorm(self.model, self.context)
        for technique in self.make_techniques():
            self._techniques.append(technique)  # one whose turn did not come has nothing to end
            technique.apply(self.model, self.context)
        if fitting:
            self.setup_optimizers(trainer)
            if self._data is not None:
                self._data.attach(self.optimizers)
        self.setup_precision_plugin()
        self._install_clipping()

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Wakes threads that wait for peers; the peers find the connection closed and end too."""
        self._failed = True
        self._leave_crew(failed=True)
        self._end_techniques()

    @override
    def teardown(self) -> None:
        try:
            if self._loaders is not None:
                self._loaders.restore()
                self._loaders = None
            self._leave_crew(self._failed)
            self._end_techniques()
            if self.model is not None:
                restore_batchnorm(self.model)
            super().teardown()
        finally:
            if self._owns_group and dist.is_initialized():
                self._end_group()
            self._owns_group = False

    def _end_techniques(self) -> None:
        techniques, context = self._techniques[::-1], self.context
        self._techniques, self.context = [], None
        for technique in techniques:
            technique.abort() if self._failed else technique.close()
        if context is not None:
            context.abort() if self._failed else context.close()

    def _end_group(self) -> None:
        if self._failed and self.root_device.type == "cuda":  # destroying would wait for collectives that never end
            torch.distributed.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    # -- one step --------------------------------------------------------------------------------------------------

    @property
    @override
    def _data(self) -> DataTechnique | None:
        last = self._techniques[-1] if self._techniques else None
        return last if isinstance(last, DataTechnique) else None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's own, which need not know whether this rank's batch is only a filler."""
        assert self.context is not None
        assert self._loaders is not None
        self._resume_step()
        self.context.idle = self._loaders.weight() == 0.0
        return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The user's backward, between `begin` and `finish`: see Note [a rank's share of the mean]."""
        module, data = self.lightning_module, self._data
        assert module is not None
        assert self._loaders is not None
        self.pre_backward(closure_loss)
        weight = self._loaders.weight()
        loss = closure_loss if weight == 1.0 else closure_loss * weight
        loss = self.precision_plugin.pre_backward(loss, module)
        if data is not None:
            data.begin()
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if data is not None:
            data.finish()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Lightning's, but a step without backward still meets the other ranks: see Note [nothing to do]."""
        module, data = self.lightning_module, self._data
        assert module is not None
        if data is None or not module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        loaders = self._loaders
        assert loaders is not None
        searches = isinstance(optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer, LBFGS)

        def closure_that_meets() -> Any:
            data.begin()
            result = closure()
            data.finish()
            # An optimizer that searches along a line decides by the loss: all ranks must see the same one.
            return self.reduce(result * loaders.weight()) if searches and isinstance(result, Tensor) else result

        return super().optimizer_step(optimizer, closure_that_meets, model, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it gradients pile up locally; Lightning enters it for all but the last micro-batch of a window."""
        if self._data is None:
            yield
        else:
            with self._data.no_sync():
                yield

    def _install_clipping(self) -> None:
        """Lightning leaves clipping to the precision plugin, which would take the norm of what this rank holds."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            parts = self._gradient_parts(optimizer)
            clip_by_norm([gradient for _, gradient in parts], self._norm(parts), clip_val)

        self.precision_plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]

    def gradient_norm(self, optimizer: Optimizer) -> float:
        """The 2-norm over the whole model of the gradients that `optimizer` will use, as clipping takes it.

        Every rank calls it, after backward; it moves one number per set of axes over which gradients are divided.
        """
        return float(self._norm(self._gradient_parts(optimizer)))

    def _gradient_parts(self, optimizer: Optimizer) -> list[tuple[Placement, Tensor]]:
        tensors = list(self.precision_plugin.main_params(optimizer))
        if self._data is not None:
            return self._data.norm_parts(tensors)
        return [(Placement("", tuple(p.shape)), p.grad) for p in tensors if p.grad is not None]

    def _norm(self, parts: list[tuple[Placement, Tensor]]) -> Tensor:
        assert self.context is not None
        return global_norm(parts, self.context.reduce)

    # -- talking ---------------------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduces over the data ranks. Every rank calls it; it moves the tensor once around.

        Args:
            tensor: any shape; anything but a tensor is returned as it is. Whole numbers are averaged as float32.
            group: a process group to use instead of the data ranks.
            reduce_op: `mean` or `avg`, `sum`, `max`, `min`, or the torch `ReduceOp`.
        """
        if not isinstance(tensor, Tensor) or self.context is None:
            return tensor
        if group is not None:
            return _sync_ddp(tensor.detach().clone(), group, reduce_op)
        name = str(getattr(reduce_op, "name", reduce_op) or "sum").lower()
        name = {"avg": "mean"}.get(name.removeprefix("redoptype."), name)
        result = tensor.detach().clone(memory_format=torch.contiguous_format).to(self.root_device)
        if name == "mean" and not (result.is_floating_point() or result.is_complex()):
            result = result.float()
        self.context.reduce(result, ("dp_replicate", "dp_shard"), name)
        return result

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks of the world (or any of them) say yes. Every rank calls it."""
        if self.context is None:
            return decision
        vote = torch.tensor(int(decision), device=self.root_device)
        self.context.reduce(vote, tuple(self.context.shape.sizes), "min" if all else "max")
        return bool(vote)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Waits until every rank of the world is here."""
        if self.context is not None:
            self.context.communicator(*self.context.shape.sizes).barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Gives every rank of the world rank `src`'s object."""
        if self.context is None:
            return obj
        result: TBroadcast = self.context.communicator(*self.context.shape.sizes).broadcast_object(obj, src=src)
        return result
