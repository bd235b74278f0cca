# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face Transformers, made from their config classes: fresh weights, no download."""

from __future__ import annotations

from typing import Any

from torch import nn

from stratagem.data.epoch import seeded
from stratagem.errors import ConfigError


def transformers_lm(config_class: str, config: dict[str, Any] | None = None, seed: int | None = None) -> nn.Module:
    """A causal language model of Transformers, for `CausalLM`; it brings its own plans.

    In a config: `class_path: stratagem.models.transformers_lm`, with `config_class` and `config` as its `init_args`.

    Args:
        config_class: for instance "LlamaConfig" or "GPT2Config".
        config: the arguments of that class. `use_cache` is off unless asked for: training has no use for it.
        seed: seeds the initial weights; None to draw them from torch's random state as it is.

    Raises:
        ConfigError: Transformers is not installed, has no such config class, or no causal language model for it, or
            the config class refuses the arguments.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "a Transformers model needs the package 'transformers', which is not installed",
            where="model",
            do='pip install "stratagem[transformers]"',
        ) from error
    found = getattr(transformers, config_class, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PretrainedConfig)):
        raise ConfigError(
            f"Transformers has no config class {config_class!r}",
            where="config_class",
            allowed="names such as LlamaConfig, GPT2Config",
        )
    try:
        settings = found(**{"use_cache": False, **(config or {})})
    except Exception as error:  # config classes check their arguments each in its own way
        raise ConfigError(f"{config_class} refuses its arguments: {error}", where="config") from error
    try:
        if seed is None:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(settings)
        else:
            with seeded(seed):
                model = transformers.AutoModelForCausalLM.from_config(settings)
    except ValueError as error:
        raise ConfigError(
            f"Transformers makes no causal language model of a {config_class} ({str(error).splitlines()[0]})",
            where="config_class",
            allowed="config classes of causal language models",
        ) from error
    return model
