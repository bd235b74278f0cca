# SPDX-License-Identifier: Apache-2.0
"""What a run asks for, and where each word of it stands: files and command line merged, with line numbers.

    --config a.yaml --config b.yaml --trainer.devices 2
    values   {"trainer": {"devices": 2, "strategy": "ring_ddp", ...}, "model": {...}}      later ones win
    origins  ("trainer", "strategy") -> b.yaml, line 2       ("trainer", "devices") -> command line

jsonargparse, which parses the run for real, stops at the first error and forgets lines. This reading exists so that
every error can be reported at once, each with its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import yaml

from stratagem.errors import ConfigError, UserError
from stratagem.registry import near

KeyPath = tuple[str, ...]

GROUPS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
"""Keys whose value may also be the path of a file that holds the whole group."""


@final
@dataclass(frozen=True)
class Origin:
    """Where a key was written: a file and a line, or the command line.

    Example:
        >>> str(Origin("run.yaml", 3)), str(Origin())
        ('run.yaml, line 3', 'command line')
    """

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" if self.file else "command line"


@final
@dataclass
class Settings:
    """The merged settings of a run.

    Attributes:
        values: nested, as a run file writes them; later sources have won.
        origins: for each key path, where its value was written last.
        carried: key paths of `init_args` that were written for another class than the one that is now named; such a key
            is dropped in silence where the new class does not know it, as jsonargparse does.
        named: key paths where options were given for what is otherwise a bare name, such as `ring_ddp`.
        problems: what was wrong with the sources themselves: missing files, broken YAML, words without an option.
        unread: a file could not be read, so that what seems absent may stand in it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    carried: set[KeyPath] = field(default_factory=set)
    named: set[KeyPath] = field(default_factory=set)
    problems: list[UserError] = field(default_factory=list)
    unread: bool = False

    def where(self, path: KeyPath) -> str:
        """The key in dotted form and the place of the nearest part of it that was written somewhere."""
        for length in range(len(path), 0, -1):
            if origin := self.origins.get(path[:length]):
                return f"{'.'.join(path)} ({origin})"
        return ".".join(path)

    def set(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Write one value at a key path, on top of what is there: mappings are merged, all else is replaced."""
        target = self.values
        for depth, key in enumerate(path[:-1]):
            here = target.get(key)
            if not isinstance(here, dict):
                if isinstance(here, str):
                    self.named.add(path[: depth + 1])
                here = {"class_path": here} if isinstance(here, str) else {}
                target[key] = here
            self.origins.setdefault(path[: depth + 1], origin)
            target = here
        self._merge(target, path, value, origin)

    def merge(self, values: Mapping[str, Any], lines: Mapping[KeyPath, int], file: str, at: KeyPath = ()) -> None:
        """Lay the content of a file over what is there, below the key path `at`."""
        for key, value in values.items():
            self.set((*at, str(key)), value, Origin(file, lines.get((str(key),), 0)))
        self.origins.update({(*at, *path): Origin(file, line) for path, line in lines.items()})

    def _merge(self, target: dict[str, Any], path: KeyPath, value: Any, origin: Origin) -> None:
        key = path[-1]
        self.origins[path] = origin
        here = target.get(key)
        if not (isinstance(value, dict) and isinstance(here, dict)):
            target[key] = _copy(value)
            return
        if "class_path" in value and value["class_path"] != here.get("class_path"):
            self.carried |= {(*path, "init_args", name) for name in here.get("init_args") or {}}
        for name, inner in value.items():
            self.carried.discard((*path, str(name)))
            self._merge(here, (*path, str(name)), inner, origin)


def read(arguments: Sequence[str]) -> Settings:
    """Read the files and options that follow the verb of a command line; nothing is imported or checked against types.

    Args:
        arguments: for instance `["--config", "run.yaml", "--trainer.devices", "2"]`.

    Returns:
        The merged settings; what could not be read is among their `problems`.
    """
    settings = Settings()
    for option, text in options(arguments, settings.problems):
        if option == "config":
            _read_file(settings, text)
        elif option in GROUPS and text.endswith((".yaml", ".yml", ".json")):
            _read_file(settings, text, at=(option,))
        else:
            _read_option(settings, option, text)
    return settings


def options(arguments: Sequence[str], problems: list[UserError]) -> Iterator[tuple[str, str]]:
    """Pairs of option, without its dashes, and the text given for it.

    Example:
        >>> list(options(["-c", "a.yaml", "--trainer.devices=2", "--print_config"], []))
        [('config', 'a.yaml'), ('trainer.devices', '2'), ('print_config', '')]
    """
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "-c" or (word.startswith("--") and len(word) > 2):
            option, assigned, text = word.removeprefix("--").partition("=")
            if not assigned and words and not words[0].startswith("--"):
                text = words.pop(0)
            yield ("config" if option == "-c" else option), text
        else:
            what = f"the word {word!r} belongs to no option"
            problems.append(ConfigError(what, where="command line", allowed="--config FILE, --KEY VALUE"))


def load(file: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """A run file as nested values, and the line of each of its keys.

    Raises:
        ConfigError: the file is missing, is not YAML, is not a mapping, or writes one key twice.
    """
    if not file.is_file():
        siblings = [str(path) for path in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        close = near(str(file), siblings)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        here = f"the files there are {', '.join(sorted(siblings)[:5])}" if siblings and not close else ""
        raise ConfigError(f"there is no such file{hint}", where=str(file), do=here)
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else str(file)
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"this is not YAML: {reason}", where=where, do="check indentation and quotes") from error
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        what = f"the file holds a {type(values).__name__}, not keys with values"
        raise ConfigError(what, where=f"{file}, line 1", allowed="keys such as trainer, model and data")
    lines: dict[KeyPath, int] = {}
    _number(tree, (), lines, str(file))
    return values, lines


def scalar(text: str) -> Any:
    """The value of a word on the command line, read as YAML; the word itself where it is not YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _read_file(settings: Settings, text: str, at: KeyPath = ()) -> None:
    try:
        values, lines = load(Path(text).expanduser())
    except ConfigError as error:
        settings.problems.append(error)
        settings.unread = True
    else:
        settings.merge(values, lines, text, at)


def _read_option(settings: Settings, option: str, text: str) -> None:
    append = option.endswith("+")
    path = tuple(option.removesuffix("+").split("."))
    path = _through_classes(settings.values, path)
    value = scalar(text)
    if append:
        here = settings.values
        for key in path:
            here = here.get(key, {}) if isinstance(here, dict) else {}
        value = [*(here if isinstance(here, list) else []), *(value if isinstance(value, list) else [value])]
    settings.set(path, value, Origin())


def _through_classes(values: Any, path: KeyPath) -> KeyPath:
    """The key path with the `init_args` put in that an option may leave out."""
    full: list[str] = []
    for key in path:
        one_class = (len(full) == 1 and full[0] in GROUPS[1:]) or full == ["trainer", "strategy"]
        if key not in _CLASS_KEYS and (one_class or (isinstance(values, dict) and "class_path" in values)):
            full.append("init_args")
            values = values.get("init_args") if isinstance(values, dict) else None
        full.append(key)
        values = values.get(key) if isinstance(values, dict) else None
    return tuple(full)


_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs", "help")


def _number(node: yaml.Node | None, path: KeyPath, lines: dict[KeyPath, int], file: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines and key.value != "<<":
                what = f"this key is written twice, in line {lines[inner]} too"
                raise ConfigError(what, where=f"{'.'.join(inner)} ({file}, line {key.start_mark.line + 1})")
            lines[inner] = key.start_mark.line + 1
            _number(value, inner, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _number(value, (*path, str(index)), lines, file)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
