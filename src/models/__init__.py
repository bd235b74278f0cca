# SPDX-License-Identifier: Apache-2.0
"""Models and data to train with any strategy: they know no plugin, and no word of parallelism is in them."""

from stratagem.models.callbacks import ProgressBar, SampleText, TokensPerSecond
from stratagem.models.causal_lm import CausalLM
from stratagem.models.gpt import GPT, GPTConfig
from stratagem.models.hub import transformers_lm
from stratagem.models.optim import OptimizerSettings
from stratagem.models.text_data import TextData
from stratagem.models.vision import ImageClassifier, ImageData, TinyConvNet

__all__ = [
    "GPT",
    "CausalLM",
    "GPTConfig",
    "ImageClassifier",
    "ImageData",
    "OptimizerSettings",
    "ProgressBar",
    "SampleText",
    "TextData",
    "TinyConvNet",
    "TokensPerSecond",
    "transformers_lm",
]
