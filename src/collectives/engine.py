# SPDX-License-Identifier: Apache-2.0
"""Runs any schedule, over any link, in any wire format: the one loop behind every ring collective."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from stratagem.collectives.ring import Action, Schedule
from stratagem.collectives.transport import Link, Message
from stratagem.collectives.wire import WireFormat

_IN_PLACE = (Action.KEEP, Action.KEEP_PASS)


def run(schedule: Schedule, flat: Tensor, fmt: WireFormat, link: Link, *, tag: int) -> None:
    """Run the hops of this rank on the 1-D tensor `flat`, in place.

    Must be called by every rank of the ring, each with its own schedule of the same collective.

    Args:
        schedule: from `ring_schedule` or `broadcast_schedule`.
        flat: contiguous, one dimension; no autograd history.
        fmt: how a piece looks in a message.
        link: to the neighbours; must hold `schedule.lanes + 1` messages.
        tag: 2 to 255, the same on all ranks of this collective and, if possible, of no other.

    Raises:
        LinkFault: from the link.
    """
    assert schedule.lanes < link.window, "see the note on deadlock in ring.py"
    dtype, raw = fmt.dtype, fmt.is_raw
    link.begin(tag, _incoming(schedule, flat, fmt))
    for hop in schedule.hops:
        action = hop.action
        mine = flat[hop.lo : hop.hi]
        numel = hop.hi - hop.lo if raw else fmt.message_numel(hop.hi - hop.lo)
        if action is Action.SEND:
            fmt.contribute(mine, link.claim(dtype, numel, mine if raw else None))
            link.push()
        elif action is Action.SEND_FINAL:
            fmt.publish(mine, link.claim(dtype, numel, mine if raw else None))
            link.push()
        else:
            got = link.pull(dtype, numel)
            if action is Action.ADD_PASS:
                assert got is not None
                fmt.add_to_message(got, mine, link.claim(dtype, numel, mine if raw else None))
                link.push()
            elif action is Action.ADD_KEEP:
                assert got is not None
                fmt.add_to_mine(got, mine)
            elif action is Action.ADD_KEEP_PASS:
                assert got is not None
                fmt.add_to_mine(got, mine)
                fmt.publish(mine, link.claim(dtype, numel, mine if raw else None))
                link.push()
            else:
                _keep(action, got, mine, fmt, link, numel)
            link.release()
    link.end()


def _keep(action: Action, got: Tensor | None, mine: Tensor, fmt: WireFormat, link: Link, numel: int) -> None:
    """A finished piece came in: pass its bits on first, others wait for them, then keep it."""
    if action is Action.KEEP_PASS:
        out = link.claim(fmt.dtype, numel, mine if fmt.is_raw else None)
        if got is None:
            assert fmt.is_raw
            if out is not mine:
                out.copy_(mine)
        elif out is mine:  # sending from `mine` needs the bits there first
            fmt.keep(got, mine)
            got = None
        else:
            out.copy_(got)
        link.push()
    if got is not None:
        fmt.keep(got, mine)


def _incoming(schedule: Schedule, flat: Tensor, fmt: WireFormat) -> Iterator[Message]:
    """The messages that will come in, in order."""
    for hop in schedule.hops:
        if hop.action.receives:
            into = flat[hop.lo : hop.hi] if fmt.is_raw and hop.action in _IN_PLACE else None
            yield Message(fmt.dtype, fmt.message_numel(hop.hi - hop.lo), into)
