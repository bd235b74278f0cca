# SPDX-License-Identifier: Apache-2.0
"""The Lightning face of DeepSpeed's ZeRO."""

from __future__ import annotations

import argparse
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, final

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.errors import ConfigError, PluginError
from stratagem.mesh import MeshShape
from stratagem.plugins.deepspeed import host, limits, shards, wide
from stratagem.plugins.deepspeed.arrivals import Arrivals, bounded
from stratagem.plugins.deepspeed.precision import EnginePrecision, allow_float64
from stratagem.plugins.deepspeed.settings import DeepSpeedSettings, engine_config
from stratagem.strategy.launcher import WarmLauncher, make_launcher
from stratagem.strategy.loaders import LoaderOrder
from stratagem.strategy.settings import RunSettings
from stratagem.strategy.sync_batchnorm import convert_batchnorm, restore_batchnorm
from stratagem.technique import Context


class DeepSpeedZeroStrategy(DeepSpeedStrategy, ABC):
    """What the stages share.

    Args:
        deepspeed: buckets, offload, raw keys.
        run: timeouts, launcher, the meaning of `batch_size`.

    Raises:
        PluginError: DeepSpeed is not installed.
    """

    stage: ClassVar[int]

    def __init__(self, deepspeed: DeepSpeedSettings = DeepSpeedSettings(), run: RunSettings = RunSettings()) -> None:
        why_not = self.unavailable()
        if why_not:
            raise PluginError(why_not, where=f"deepspeed_zero_{self.stage}", do="pip install 'stratagem[deepspeed]'")
        limits.check_run(run)
        # Lightning's own constructor would import DeepSpeed before it is known for which devices.
        DDPStrategy.__init__(self, process_group_backend=run.backend, timeout=run.timeout)
        self.settings, self.run = deepspeed, run
        self.config: dict[str, Any] = {"zero_optimization": {"stage": self.stage}}
        self.remote_device, self.load_full_weights, self.exclude_frozen_parameters = None, False, False
        self._config_initialized = True
        self._host = host.Host()
        self._context: Context | None = None
        self._loaders: LoaderOrder | None = None
        self._plain: shards.PlainModule | None = None
        self._arrivals: Arrivals | None = None
        self._failed, self._num_bytes = False, 0
        allow_float64()

    @staticmethod
    def unavailable() -> str:
        """Why this strategy cannot run here, or the empty string; imports nothing."""
        return host.missing()

    # -- start and end ---------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Lightning's choice, replaced by ours of the same name."""
        if plugin is not None and not isinstance(plugin, EnginePrecision):
            plugin = EnginePrecision(str(plugin.precision))
        self._precision_plugin = plugin

    @override
    def _configure_launcher(self) -> None:
        assert isinstance(self.cluster_environment, ClusterEnvironment)
        kinds = {device.type for device in self.parallel_devices or ()}
        if not kinds <= {"cpu", "cuda"}:
            found = ", ".join(sorted(kinds))
            raise ConfigError(f"the devices are {found}", where="trainer.accelerator", allowed="cpu, gpu with CUDA")
        self._launcher = make_launcher(self, self.run.launcher)
        if isinstance(self._launcher, WarmLauncher):
            host.load("cpu")  # once, here, for all the ranks that will be forked

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        self._failed = False
        backend = self.run.backend or _get_default_process_group_backend_for_device(self.root_device)
        self._process_group_backend = backend
        timeout = self._timeout or self.run.timeout
        self._host.open(self.cluster_environment, backend, timeout=timeout, device=self.root_device)
        shape = MeshShape.fit(self.world_size, fill="dp_shard")
        self._context = Context(shape, self.global_rank, self.root_device, timeout=timeout)
        self._loaders = LoaderOrder(self, self.lightning_module.trainer, self.run.batch_size)

    @override
    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # without the refusal of everything but CUDA

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert self.accelerator is not None
        assert self.model is not None
        assert module is not None
        assert self._context is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            limits.check_module(module, trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model.to(self.root_device)
        if fitting and self._layer_sync is not None:
            convert_batchnorm(self.model, self._context)
        for buffer in self.model.buffers():  # DeepSpeed sends parameters only
            dist.broadcast(buffer, 0)
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._plain = shards.PlainModule(self.model)
        self._num_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        self.config = engine_config(self.settings, self.stage, str(self.precision_plugin.precision))
        self.init_deepspeed()
        self.barrier()

    @override
    def init_deepspeed(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._initialize_deepspeed_train(self.lightning_module)
        elif self.zero_stage_3:
            self._initialize_deepspeed_inference(self.lightning_module)
        # Stages 1 and 2 divide nothing that evaluation needs.

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        assert isinstance(model, LightningModule)
        optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(model)
        optimizer = limits.the_optimizer(optimizers, model)
        self._arrivals = Arrivals(model)
        is_wide = self.precision_plugin.precision == "64-true"
        with wide.float64_masters() if is_wide else nullcontext():
            self.model, stepped = self._engine(model, optimizer, self.config)
        if is_wide:
            wide.send_float64(stepped, lambda: shards.gradient_norm(stepped))
        self._arrivals.watch(stepped)
        self.optimizers = [stepped]  # Lightning steps the schedules, which share its parameter groups

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        config = {key: value for key, value in self.config.items() if key not in ("fp16", "bf16")}
        self.model, _ = self._engine(model, None, config)

    def _engine(self, model: nn.Module, optimizer: Optimizer | None, config: dict[str, Any]) -> tuple[Any, Any]:
        import deepspeed

        trained = [] if optimizer is None else [p for p in model.parameters() if p.requires_grad]
        engine, stepped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.root_device.index or 0),
            config=config,
            model=model,
            model_parameters=trained,
            optimizer=optimizer,
            dist_init_required=False,
        )
        return engine, stepped

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    @override
    def teardown(self) -> None:
        try:
            if self._loaders is not None:
                self._loaders.restore()
                self._loaders = None
            self._end_engine()
            DDPStrategy.teardown(self)
        finally:
            context, self._context = self._context, None
            if context is not None:
                context.abort() if self._failed else context.close()
                self._host.close(failed=self._failed)

    def _end_engine(self) -> None:
        engine, module, plain = self.model, self.lightning_module, self._plain
        self._plain = None
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        if plain is None or module is None:
            return
        if engine is not module:
            if not self._failed:
                plain.gather()
            engine.destroy()  # type: ignore[union-attr,operator]
            self.model = module
        plain.restore()
        self.optimizers = []
        restore_batchnorm(module)

    # -- one step --------------------------------------------------------------------------------------------------

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Lightning's own accumulation is kept, so that hooks run once per step and a short last window steps too."""
        return False

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it gradients pile up; Lightning enters it for all but the last micro-batch of a window."""
        engine: Any = self.model
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._plain is not None
        assert self._context is not None
        assert self._loaders is not None
        changes = self._plain.changes()
        if changes:
            raise ConfigError(
                f"after DeepSpeed had divided the parameters, {'; '.join(changes[:3])}",
                where=type(self.lightning_module).__name__,
                do="build, freeze and unfreeze parameters in __init__ or configure_model",
            )
        self._context.idle = self._loaders.weight() == 0.0
        with bounded(self.stage, self._timeout or self.run.timeout):
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The engine's backward of this rank's share of the mean: ranks with fewer samples weigh less."""
        module = self.lightning_module
        assert module is not None
        assert self._loaders is not None
        self.pre_backward(closure_loss)
        weight = self._loaders.weight()
        loss = self.precision_plugin.pre_backward(closure_loss if weight == 1.0 else closure_loss * weight, module)
        assert self._arrivals is not None
        with bounded(self.stage, self._timeout or self.run.timeout):
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            self._arrivals.check()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """As Lightning's; but whole numbers are averaged as float32.

        Lightning would cut the mean off: what is logged is divided by the mean number of samples, so that an epoch's
        values would be wrong where ranks have an odd number of them.
        """
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        if isinstance(tensor, Tensor) and name in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor if tensor.is_complex() else tensor.float()
        return super().reduce(tensor, group, reduce_op)

    def gradient_norm(self, optimizer: Optimizer | None = None) -> float:
        """The 2-norm of the whole averaged gradient before clipping; right before the optimizer's step.

        Every rank calls it; one number travels. Computed from DeepSpeed's own pieces, in float64, as its step will do
        it once more in its own way.

        Args:
            optimizer: there is one only; for the face of other strategies.
        """
        (stepped,) = self.optimizers
        found: Any = stepped
        return shards.gradient_norm(found) / float(found.loss_scale)

    def wire_bytes_per_step(self) -> dict[str, float]:
        """Bytes that this rank sends per optimizer step on Gloo, by axis. Local; between `setup` and `teardown`.

        Gloo moves a whole all-reduce for a reduce-scatter. Stage 3 as with `comparable`; it sends up to 3 % more, since
        each small parameter is padded, or less, where it keeps parameters. NCCL sends `2`, `1 + accumulation` and `3`
        for each micro-batch.
        """
        assert self.lightning_module is not None
        micro = self.lightning_module.trainer.accumulate_grad_batches
        times = {1: 3, 2: 2 * micro + 1, 3: 4 * micro}[self.stage]
        return {"dp_shard": times * self._num_bytes * (self.world_size - 1) / self.world_size}

    def held_bytes(self) -> dict[str, float]:
        """Bytes that this rank holds before the optimizer's step, in float32 or float64, by kind. Local; as above.

        `parameters`: those of the module and the share that is stepped. `gradients`: a share; stage 3's buffer of
        `bucket_mib` is not counted.
        """
        share = self._num_bytes / self.world_size
        return {"parameters": (2 * share if self.stage == 3 else self._num_bytes + share), "gradients": share}

    # -- state -----------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole on rank 0, under the names of the plain module. Every rank calls it; stage 3 gathers."""
        assert self.lightning_module is not None
        return shards.whole_state(self.lightning_module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """From a checkpoint of any other strategy; DeepSpeed's own has been loaded by `load_checkpoint` already."""
        if "state_dict" not in checkpoint:
            return
        assert self.lightning_module is not None
        shards.load_whole_state(self.lightning_module, checkpoint["state_dict"], strict=strict)
        for optimizer in self.optimizers:
            masters: Any = optimizer
            masters.refresh_fp32_params()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """A file is another strategy's, a directory DeepSpeed's own."""
        if Path(checkpoint_path).is_dir() and self.model is not self.lightning_module:
            assert self.lightning_module is not None
            if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
                raise ConfigError(
                    "DeepSpeed's inference engine of stage 3 reads no directory of its training engine",
                    where=f"ckpt_path {checkpoint_path}",
                    do="`stratagem convert` it, or evaluate at the end of the fit",
                )
            return super().load_checkpoint(checkpoint_path, weights_only)
        return DDPStrategy.load_checkpoint(self, checkpoint_path, weights_only)


@final
class DeepSpeedZero1Strategy(DeepSpeedZeroStrategy):
    """DeepSpeed's ZeRO stage 1: the optimizer's state is divided over the ranks.

    Args:
        deepspeed: buckets, offload, raw keys.
        run: timeouts, launcher, the meaning of `batch_size`.
    """

    stage = 1


@final
class DeepSpeedZero2Strategy(DeepSpeedZeroStrategy):
    """DeepSpeed's ZeRO stage 2: gradients and the optimizer's state are divided over the ranks.

    Args:
        deepspeed: buckets, offload, raw keys.
        run: timeouts, launcher, the meaning of `batch_size`.
    """

    stage = 2


@final
class DeepSpeedZero3Strategy(DeepSpeedZeroStrategy):
    """DeepSpeed's ZeRO stage 3: parameters, gradients and the optimizer's state are divided over the ranks.

    Args:
        deepspeed: buckets, offload, raw keys.
        run: timeouts, launcher, the meaning of `batch_size`.
    """

    stage = 3
