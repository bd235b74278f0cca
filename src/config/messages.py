# SPDX-License-Identifier: Apache-2.0
"""One sentence out of jsonargparse's many lines: which key, what was expected, what was given.

jsonargparse answers a wrong value with the whole tree of types that it tried. The tests hold one message of each kind,
so that a release that words them differently is noticed; a message that is not understood is passed on shortened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Fault:
    """What a message says.

    Attributes:
        keys: the key at fault, as far as the message tells, outermost first; each may be dotted.
        unknown: the key is not one of the class or group.
        missing: keys that are required and absent.
        what: the fault as a clause.
        allowed: which values would be right.
        owner: import path of the class that does not know the key, or the empty string.
    """

    keys: tuple[str, ...] = ()
    unknown: bool = False
    missing: tuple[str, ...] = ()
    what: str = ""
    allowed: str = ""
    owner: str = ""


_KEY = re.compile(r'Parser key "([^"]+)"')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN = re.compile(r"Option '([^']+)' is not accepted|Group '([^']+)' does not accept option '([^']+)'")
_MISSING = re.compile(r"the following arguments are required: (.+)")
_EXPECTED = re.compile(r"Expected an? (.+?)\. Got value: (.*)", re.DOTALL)
_SUBTYPES = re.compile(r"Subtypes: \[(.*)\]")
_GIVEN = re.compile(r"Given value: (.*)")
_NOT_A = re.compile(r"Import path (\S+) does not correspond to a subclass of (\S+)")


def understand(message: str) -> Fault:
    """Read one error message of jsonargparse.

    Example:
        >>> understand('Parser key "max_steps":\\n  Expected a <class \\'int\\'>. Got value: three')
        Fault(keys=('max_steps',), unknown=False, missing=(), what="got 'three'", allowed='int', owner='')
    """
    keys = tuple(_KEY.findall(message))
    owners = _OWNER.findall(message)
    owner = owners[-1] if owners else ""
    if found := _MISSING.search(message):
        return Fault(keys, missing=tuple(key.strip() for key in found.group(1).split(",")), owner=owner)
    if found := _UNKNOWN.search(message):
        option, group, inner = found.groups()
        return Fault((*keys, option or f"{group}.{inner}"), unknown=True, owner=owner)
    if found := _NOT_A.search(message):
        return Fault(keys[:1], what=f"{found.group(1)} is not one of the classes that fit here", allowed=found.group(2))
    innermost = message[message.rfind('Parser key "') :] if keys else message
    if subtypes := _SUBTYPES.search(innermost):
        given = _GIVEN.findall(innermost)
        return Fault(
            keys, what=f"got {_shown(given[-1])}" if given else "wrong value", allowed=_types(subtypes.group(1))
        )
    if found := _EXPECTED.search(innermost):
        return Fault(keys, what=f"got {_shown(found.group(2))}", allowed=_types(found.group(1)))
    words = [line.strip(" -") for line in innermost.splitlines() if line.strip() and not _KEY.search(line)]
    return Fault(keys, what=": ".join(words[-2:]) or message.strip(), owner=owner)


def _shown(value: str) -> str:
    first = value.strip().split("\n")[0]
    return first if first[:1] in "[{'\"" and first else repr(first)


def _types(listing: str) -> str:
    """Type names as a reader of YAML knows them.

    Example:
        >>> _types("list[int], <class 'str'>, typing.Literal['a', 'b'], <class 'NoneType'>")
        'list[int], str, a, b, null'
    """
    plain = re.sub(r"<class '([^']+)'>", lambda found: found.group(1).rpartition(".")[2], listing)
    plain = re.sub(r"(?:typing\.)?Literal\[([^\]]*)\]", r"\1", plain)
    plain = plain.replace("typing.", "").replace("NoneType", "null").replace("'", "")
    return ", ".join(dict.fromkeys(plain.split(", ")))
