# SPDX-License-Identifier: Apache-2.0
"""Names to classes: what every installed package offers, found without importing any of it.

A package offers a strategy or a technique by an entry point; its name is the registered name, its value says where the
class lies. Reading entry points reads text files only, so listing a hundred plugins imports none; `Entry.load` imports
the one that was asked for.

    entry point        ring_ddp = "stratagem.plugins.ring_ddp:RingDDPStrategy"     in group stratagem.strategies
    strategies()       {"ring_ddp": Entry(...)}                                    nothing imported
    find("ring_ddp")   that entry, or an error with the near names                 nothing imported
    .load()            the class, or an error that says why not                    one plugin imported

One bad plugin never harms another: a name that two packages claim, a name that is malformed, and a plugin whose import
fails stay in the mapping, carry the reason, and raise it only when that very name is loaded. This module is plain
Python: it knows neither Lightning nor torch.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, final

from stratagem.errors import PluginError

STRATEGIES = "stratagem.strategies"
"""Entry-point group whose values are called without arguments and return a Lightning strategy."""

TECHNIQUES = "stratagem.techniques"
"""Entry-point group of what one mesh axis does to a model, in plain torch."""

_KINDS = {STRATEGIES: "strategy", TECHNIQUES: "technique"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One registered name: where it points, and which package brought it.

    Attributes:
        name: the registered name, as a config writes it.
        group: `STRATEGIES` or `TECHNIQUES`.
        value: what the entry point names, `package.module:attribute`.
        distribution: the installed package that brought it; where two claim the name, the first in alphabetical order.
        version: that package's version.
        refusal: why this name cannot be selected, or the empty string.

    Example:
        >>> entry = Entry(name="od", group=TECHNIQUES, value="collections:deque", distribution="demo", version="1")
        >>> entry.load().__name__
        'deque'
    """

    name: str
    group: str
    value: str
    distribution: str
    version: str
    refusal: str = ""

    @property
    def where(self) -> str:
        """The entry point in words, as errors name it."""
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"

    @property
    def kind(self) -> str:
        """`strategy` or `technique`."""
        return _KINDS.get(self.group, "plugin")

    def load(self) -> Callable[..., Any]:
        """Import the plugin and return what its entry point names; no other plugin is imported.

        Returns:
            The class or other callable.

        Raises:
            PluginError: the name is refused (`refusal`), a module is missing (the message names the extra that brings
                it), or the import fails; the original error is chained.
        """
        if self.refusal:
            remedy = "uninstall all but one of them" if _NAME.fullmatch(self.name) else "rename the entry point"
            raise PluginError(self.refusal, where=self.where, do=remedy)
        module_name, _, attribute = self.value.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)  # may import in its turn: packages may load their classes lazily
        except ModuleNotFoundError as error:
            raise self._missing_module(error) from error
        except PluginError:  # the plugin says itself what is wrong
            raise
        except Exception as error:  # whatever a stranger's module raises while it is imported
            what = f"its import failed with {type(error).__name__}: {error}"
            raise PluginError(what, where=self.where, do=f"run python -c 'import {module_name}' to see it") from error
        if not callable(found):
            what = f"{self.value} is {type(found).__name__}, which cannot be called"
            raise PluginError(what, where=self.where, allowed="a class, or a callable that returns a strategy")
        return found

    def _missing_module(self, error: ModuleNotFoundError) -> PluginError:
        missing = error.name or str(error)
        own_module = self.value.partition(":")[0].strip()
        if own_module == missing or own_module.startswith(f"{missing}."):
            what = f"its entry point names the module {own_module}, which does not exist"
            return PluginError(what, where=self.where, do=f"install {self.distribution} again")
        extra = extra_that_brings(missing, distribution=self.distribution)
        wanted = f"{self.distribution}[{extra}]" if extra else missing.partition(".")[0]
        what = f"it needs the module {missing}, which is not installed"
        return PluginError(what, where=self.where, do=f"pip install '{wanted}'")


def strategies() -> Mapping[str, Entry]:
    """Every strategy that an installed package offers, by registered name in alphabetical order; imports nothing."""
    return entries(STRATEGIES)


def techniques() -> Mapping[str, Entry]:
    """Every technique that an installed package offers, by registered name in alphabetical order; imports nothing."""
    return entries(TECHNIQUES)


def entries(group: str) -> Mapping[str, Entry]:
    """Every entry of a group by name in alphabetical order, refused ones included; a read-only view, read afresh.

    Args:
        group: `STRATEGIES` or `TECHNIQUES`.
    """
    claims: dict[str, set[tuple[str, str, str]]] = {}
    for point in metadata.entry_points(group=group):
        owner = (point.dist.name, point.dist.version) if point.dist else ("an unknown package", "0")
        claims.setdefault(point.name, set()).add((*owner, f"{point.module}:{point.attr}"))
    return MappingProxyType({name: _entry(name, group, sorted(claims[name])) for name in sorted(claims)})


def find(name: str, *, group: str = STRATEGIES, also: Iterable[str] = ()) -> Entry:
    """The entry of a name; imports nothing.

    Args:
        name: the registered name, exactly.
        group: `STRATEGIES` or `TECHNIQUES`.
        also: further names that the caller knows, shown beside ours when the name is unknown.

    Raises:
        PluginError: no package offers the name; the message lists the near names, then all.
    """
    known = entries(group)
    if name in known:
        return known[name]
    raise unknown(name, {*known, *also}, kind=_KINDS.get(group, "plugin"))


def unknown(name: str, known: Iterable[str], *, kind: str, where: str = "") -> PluginError:
    """The error for a name that nobody registered, with the near names first.

    Example:
        >>> print(unknown("ring_dpp", ["ddp", "ring_ddp"], kind="strategy"))
        no strategy is called 'ring_dpp' (did you mean ring_ddp?). Allowed: ddp, ring_ddp.
    """
    names = sorted(known)
    close = near(name, names)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    what = f"no {kind} is called {name!r}{hint}"
    return PluginError(what, where=where, allowed=", ".join(names) or f"none, since no {kind} is installed")


def near(word: str, known: Iterable[str]) -> list[str]:
    """Up to three known words that resemble `word` about equally well, the nearest first; case is ignored.

    Example:
        >>> near("Max_Stps", ["max_steps", "devices", "max_epochs"])
        ['max_steps']
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=3, cutoff=0.65)
    likeness = [difflib.SequenceMatcher(None, candidate, word.lower()).ratio() for candidate in close]
    return [by_lower[name] for name, ratio in zip(close, likeness, strict=True) if ratio >= likeness[0] - 0.15]


def extra_that_brings(module: str, *, distribution: str) -> str:
    """The extra of an installed package that would install a module, or the empty string.

    Where several extras do, the one named like the module wins, then the one that asks for least.

    Args:
        module: the module that is missing; only its top-level name counts.
        distribution: the installed package whose extras are searched.
    """
    wanted = _normal(module.partition(".")[0])
    asks: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return ""
    for requirement in requirements:
        package = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", requirement)
        if package and extra:
            asks.setdefault(extra.group(1), []).append(_normal(package.group()))
    offers = [extra for extra, packages in asks.items() if wanted in packages]
    return min(offers, key=lambda extra: (_normal(extra) != wanted, len(asks[extra]), extra), default="")


def _entry(name: str, group: str, owners: list[tuple[str, str, str]]) -> Entry:
    distribution, version, value = owners[0]
    refusal = ""
    if not _NAME.fullmatch(name):
        refusal = f"the name {name!r} is not of the form [a-z][a-z0-9_]* (Lightning lower-cases names before it looks)"
    elif len(owners) > 1:
        claimed = " and ".join(f"{owner} {version} ({value})" for owner, version, value in owners)
        refusal = f"the name {name!r} is claimed by {claimed}"
    return Entry(name=name, group=group, value=value, distribution=distribution, version=version, refusal=refusal)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
