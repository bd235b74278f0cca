# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint into one of another kind: stratagem folder, .ckpt, safetensors; from DeepSpeed too.

  stratagem convert runs/step=100.ckpt whole.ckpt           a folder of ours -> Lightning's single file
  stratagem convert whole.ckpt step=100.ckpt --to folder    and back, bit for bit
  stratagem convert runs/step=100.ckpt my-llama --to safetensors --config-from config.json
  stratagem convert runs/last.ckpt resumed --to folder      a checkpoint of DeepSpeed's ZeRO, with moments

What SOURCE is, is seen from what lies there. One tensor is held at a time, and TARGET is there when it is complete.
What went along and what did not is printed. A single file resumes with plain data loaders; positions of stratagem's
are set aside in it, for the way back to a folder (--keep-loaders leaves them where Lightning looks).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from stratagem.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the checkpoint: a folder or a file")
    parser.add_argument("target", metavar="TARGET", type=Path, help="what to make; X.ckpt is a single file")
    parser.add_argument("--to", choices=("folder", "ckpt", "safetensors"), help="what TARGET is to be")
    parser.add_argument("--weights-only", action="store_true", help="leave out what only training needs")
    parser.add_argument("--dtype", help="of the weights: float64, float32, bfloat16, float16")
    parser.add_argument("--prefix", default="model.", help='before a Hugging Face model\'s names (default "model.")')
    parser.add_argument(
        "--config-from", metavar="PATH", type=Path, help="a config.json, a folder with one, or the config.yaml of a run"
    )
    parser.add_argument("--shard-mb", type=int, default=5000, help="largest safetensors file (default 5000)")
    parser.add_argument(
        "--keep-loaders", action="store_true", help="in a .ckpt: positions of data loaders, for loaders that take one"
    )
    parser.add_argument("--force", action="store_true", help="replace TARGET if it is there")
    parser.add_argument("--trust", action="store_true", help="let SOURCE's pickles run: only if you know who wrote it")
    parser.add_argument(
        "--verify", choices=("checksums", "sizes"), default="checksums", help="what is compared before a folder is read"
    )


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was converted; returns 0.

    Raises:
        CheckpointError: SOURCE is no checkpoint, is damaged, or does not fit.
        ConfigError: options do not fit each other, or TARGET is there.
    """
    from stratagem.checkpoint.convert import DTYPES, Settings, convert

    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"{options.dtype!r}", where="--dtype", allowed=", ".join(DTYPES))
    if options.shard_mb < 1:
        raise ConfigError(f"{options.shard_mb}", where="--shard-mb", allowed="1 or more")
    settings = Settings(
        to=options.to,
        weights_only=options.weights_only,
        dtype=None if options.dtype is None else DTYPES[options.dtype],
        prefix=options.prefix,
        config_from=options.config_from,
        shard_bytes=options.shard_mb * 10**6,
        force=options.force,
        trust=options.trust,
        deep=options.verify == "checksums",
        keep_loaders=options.keep_loaders,
    )
    done = convert(options.source, options.target, settings)
    print(
        f"{done.source} -> {options.target} ({done.target}): {done.num_weights} weights with {done.num_elements:,} "
        f"elements, {done.num_states} tensors of optimizer state, {done.num_bytes / 2**20:.1f} MiB"
    )
    for word, told in (
        ("carried", done.carried),
        ("carried, for stratagem's strategies alone", done.ours_only),
        ("left out", done.left_out),
    ):
        if told:
            print(f"{word}: {'; '.join(told)}")
    return 0
