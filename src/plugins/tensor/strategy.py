# SPDX-License-Identifier: Apache-2.0
"""The Lightning face of tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, final

from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from stratagem.boxes import Boxed
from stratagem.errors import ConfigError
from stratagem.mesh import MeshShape
from stratagem.plugins.tensor.settings import TensorSettings
from stratagem.plugins.tensor.technique import TensorParallel, resolve
from stratagem.registry import TECHNIQUES, find
from stratagem.strategy.base import MeshStrategy
from stratagem.strategy.settings import RunSettings
from stratagem.technique import DataTechnique, Technique

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

DataName = Literal["ring_ddp", "zero_1", "zero_2", "zero_3"]


@final
class TensorParallelStrategy(MeshStrategy):
    """Matrices divided over `tp` ranks, which read the same batch; the other ranks are data ranks.

    Use it where one layer is too large or too slow for one device, on ranks that talk fast. Bytes that a rank holds: of
    the matrices that the plan names `1/tp`, of the rest all. Bytes that it sends: see `TensorParallel`, and for the
    gradients of what it holds the data technique's.

    Args:
        tp: ranks that divide a model between them; -1 for all devices.
        data: what the data ranks do with gradients and optimizer state, a registered technique with its defaults.
        tensor: the plan, sequence parallelism, uneven sizes.
        run: timeouts, transport, launcher, the meaning of `batch_size`.

    Example:
        >>> TensorParallelStrategy(tp=2).mesh_shape(4).sizes
        {'pp': 1, 'dp_replicate': 2, 'dp_shard': 1, 'cp': 1, 'tp': 2}
    """

    def __init__(
        self,
        tp: int = -1,
        data: DataName = "ring_ddp",
        tensor: TensorSettings = TensorSettings(),
        run: RunSettings = RunSettings(),
    ) -> None:
        super().__init__(run)
        if tp < 1 and tp != -1:
            raise ConfigError(f"tp is {tp}", where="tp", allowed="1 or more, or -1 for all devices")
        self.tp, self.data, self.tensor = tp, data, tensor
        self._checked: LightningModule | None = None

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        data = self._data_class()  # a wrong name is refused here, before any process starts
        if self.tp == -1:
            return MeshShape.fit(world_size, fill="tp")
        return MeshShape.fit(world_size, fill=data.axis, tp=self.tp)

    def _data_class(self) -> type[DataTechnique]:
        found: Any = find(self.data, group=TECHNIQUES).load()
        if not (isinstance(found, type) and issubclass(found, DataTechnique)):
            raise ConfigError(
                f"{self.data} owns no gradients", where="data", allowed="ring_ddp, zero_1, zero_2, zero_3"
            )
        return found

    @override
    def make_techniques(self) -> list[Technique]:
        return [TensorParallel(self.tensor), Boxed(self._data_class()(), "tp")]

    @property
    @override
    def launcher(self) -> _Launcher | None:
        """Asked for before any process starts: a module that cannot be cut is refused here."""
        module = self.lightning_module
        if module is not None and self.context is None and not is_overridden("configure_model", module):
            degree = self.shape.tp
            if degree > 1 and self._checked is not module:
                resolve(module, degree, self.tensor)
                self._checked = module
        return super().launcher

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        data: Any = self._data
        if hasattr(data.inner, "agree_on_overflow"):
            data.inner.agree_on_overflow = getattr(self.precision_plugin, "scaler", None) is not None
