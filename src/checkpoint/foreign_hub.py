# SPDX-License-Identifier: Apache-2.0
"""Folders as Hugging Face's `from_pretrained` reads them and `save_pretrained` writes them.

    config.json                         which model
    model.safetensors                   the weights, or with many
    model-00001-of-00002.safetensors    a part of them, and
    model.safetensors.index.json        which is where

A module around the model (our `CausalLM` calls it `model`) puts a prefix before every name, which is taken off here and
put back. A tied weight is stored under its first name only; the metadata tells the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import torch

from stratagem.checkpoint import commit, foreign_safetensors, tree
from stratagem.checkpoint.foreign_picture import Leaf, Picture
from stratagem.errors import CheckpointError, ConfigError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
COMPILED = "_orig_mod."
"""What `torch.compile` puts into names."""


def read(source: Path, *, prefix: str = "model.") -> Picture:
    """The weights of a folder, or of a single file, under the names that a module gives them.

    Args:
        source: the folder or file.
        prefix: put before each name.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    folder = source if source.is_dir() else source.parent
    leaves: dict[str, Leaf] = {}
    ties: dict[str, str] = {}
    for path in [source] if source.is_file() else _files(folder):
        found, told = foreign_safetensors.read(path)
        leaves.update(found)
        ties.update({alias: name for alias, name in told.items() if name in found})
    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    notes = []
    if not ties and config:
        ties, note = _ties_of_model(config, leaves)
        notes += [note] if note else []
    state: dict[str, Any] = {}
    for name, leaf in leaves.items():
        state[prefix + name] = leaf
    for alias, name in ties.items():
        if name in leaves:
            state.setdefault(prefix + alias, leaves[name])
    try:
        version = distributions.version("lightning")
    except distributions.PackageNotFoundError:
        version = ""
    # Lightning takes a checkpoint without a version for one of its first, and migrates it through all the others.
    found_tree = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": version, tree.STATE: state}
    return Picture(found_tree, "safetensors", tuple(notes), config)


def write(picture: Picture, folder: Path, *, prefix: str, config: Mapping[str, Any], shard_bytes: int) -> list[str]:
    """Writes the folder; it is on disk when this returns. Returns what was left out.

    Args:
        picture: what is converted.
        folder: is made.
        prefix: taken off each name; what is named otherwise is left out.
        config: of the model; nothing is written where it is empty.
        shard_bytes: the most that one file holds, if it holds more than one tensor.

    Raises:
        CheckpointError: no name has the prefix.
        OSError: the disk is full or the folder cannot be written to.
    """
    aliases = picture.aliases()
    leaves: dict[str, Leaf] = {}
    others, notes = [], []
    for name, value in picture.state.items():
        leaf = Leaf.of(value)
        if leaf is None or not name.startswith(prefix):
            others.append(name)
        elif name not in aliases:
            leaves[_bare(name, prefix)] = leaf
    if not leaves:
        raise CheckpointError(
            f"no weight has the prefix {prefix!r}: {', '.join(list(picture.state)[:3])}, ...",
            where="--prefix",
            do='name what comes before the model\'s own names, or --prefix ""',
        )
    notes += [f"{len(others)} tensors without the prefix {prefix!r} ({', '.join(others[:3])})"] if others else []
    told = {"format": "pt"} | {
        _bare(alias, prefix): _bare(name, prefix)
        for alias, name in aliases.items()
        if alias.startswith(prefix) and name.startswith(prefix)
    }
    folder.mkdir()
    shards = list(_shards(leaves, shard_bytes))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        mine = {alias: name for alias, name in told.items() if name in names or alias == "format"}
        foreign_safetensors.write(folder / file, {name: leaves[name] for name in names}, mine)
        index.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = {"total_size": sum(leaf.num_bytes for leaf in leaves.values())}
        commit.write_text(folder / INDEX, json.dumps({"metadata": total, "weight_map": index}, indent=1))
    if config:
        dtypes = [leaf.dtype for leaf in leaves.values() if leaf.dtype.is_floating_point]
        known = {key: value for key, value in config.items() if key != "torch_dtype"}
        if dtypes:  # `from_pretrained` loads in the config's dtype, so it has to be the weights' own
            known["dtype"] = str(max(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
        commit.write_text(folder / CONFIG, json.dumps(known, indent=2, sort_keys=True) + "\n")
    commit.sync_folder(folder)
    return notes


def find_config(given: Path | None, picture: Picture) -> dict[str, Any]:
    """The model's config: the one named, the source's own, or one made from what the module was built with.

    Args:
        given: a folder with `config.json`, that file, or the YAML file of a run.
        picture: the source; its hyper-parameters may say how the model was built.

    Raises:
        ConfigError: nothing is found where it was named, or Transformers is missing.
    """
    if given is not None:
        path = given / CONFIG if given.is_dir() else given
        if path.suffix in (".yaml", ".yml"):
            found = _built(_read_yaml(path))
            if not found:
                raise ConfigError(
                    "no config_class is in it", where=str(path), allowed="a run with a Transformers model"
                )
            return found
        return read_config(path)
    return dict(picture.config) or _built(picture.tree.get("hyper_parameters"))


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`.

    Raises:
        ConfigError: it is not there or no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model's config cannot be read ({error})", where=str(path)) from error
    if not isinstance(found, dict):
        raise ConfigError("it is no JSON object", where=str(path), allowed="a config.json as Transformers writes it")
    return found


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"it cannot be read ({error})", where=str(path)) from error


def _built(arguments: Any) -> dict[str, Any]:
    """The config that `transformers_lm(config_class, config)` would build, wherever in a tree these arguments are."""
    if isinstance(arguments, Mapping):
        name = arguments.get("config_class")
        if isinstance(name, str):
            transformers = _transformers()
            kind = getattr(transformers, name, None)
            if isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig):
                settings = kind(**(arguments.get("config") or {}))
                found: dict[str, Any] = json.loads(settings.to_json_string(use_diff=False))
                return found
        arguments = list(arguments.values())
    if isinstance(arguments, list):
        return next((found for item in arguments if (found := _built(item))), {})
    return {}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "the config of a Transformers model needs the package 'transformers', which is not installed",
            do='pip install "stratagem[transformers]", or --config-from a config.json',
        ) from error
    return transformers


def _ties_of_model(config: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> tuple[dict[str, str], str]:
    """Which names the model ties, where the file does not tell: the model says, built without memory."""
    try:
        transformers = _transformers()
        kind = dict(config)
        settings = transformers.AutoConfig.for_model(kind.pop("model_type"), **kind)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
    except ConfigError:
        return {}, "names of tied weights (Transformers is not installed, so nobody tells which they are)"
    except Exception as error:  # its code, its errors; the weights themselves are not in doubt
        return {}, f"names of tied weights (Transformers makes no model of the config: {str(error).splitlines()[0]})"
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    ties = {}
    for names in by_tensor.values():
        stored = next((name for name in names if name in leaves), None)
        if stored is not None:
            ties.update({name: stored for name in names if name not in leaves})
    return ties, ""


def _files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the index cannot be read ({error})", where=str(folder / INDEX)) from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"{', '.join(missing[:3])} is missing, which the index names", where=str(folder))
    return [folder / name for name in sorted(names)]


def _shards(leaves: Mapping[str, Leaf], most: int) -> Iterator[list[str]]:
    names: list[str] = []
    used = 0
    for name, leaf in leaves.items():
        if names and used + leaf.num_bytes > most:
            yield names
            names, used = [], 0
        names.append(name)
        used += leaf.num_bytes
    yield names


def _bare(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).replace(COMPILED, "")
