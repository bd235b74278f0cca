# SPDX-License-Identifier: Apache-2.0
"""The byte counter against operations whose traffic is known by arithmetic."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from stratagem.measure.wire import WireBytes, bytes_sent

_NUM_BYTES = 4 * 2**20


@pytest.mark.ranks(2, 3, 4)
def test_an_all_reduce_sends_what_the_formula_says(num_ranks: int) -> None:
    tensor = torch.ones(_NUM_BYTES // 4)
    dist.all_reduce(tensor)  # the connections are made lazily
    with WireBytes() as wire:
        dist.all_reduce(tensor)
    formula = 2 * (num_ranks - 1) / num_ranks * _NUM_BYTES
    assert wire.total == pytest.approx(formula, rel=0.005)


@pytest.mark.ranks(3)
def test_the_matrix_says_who_sent_to_whom() -> None:
    """Rank r sends r + 1 MiB to the next rank around the circle, and nothing to the one before."""
    rank, mib = dist.get_rank(), 2**20
    out, into = torch.ones((rank + 1) * mib, dtype=torch.uint8), torch.empty(4 * mib, dtype=torch.uint8)
    before = (rank - 1) % 3
    with WireBytes() as wire:
        sending = dist.isend(out, dst=(rank + 1) % 3)
        dist.recv(into[: (before + 1) * mib], src=before)
        assert sending is not None
        sending.wait()
    matrix = wire.matrix()
    for sender in range(3):
        for receiver in range(3):
            expected = (sender + 1) * mib if receiver == (sender + 1) % 3 else 0
            assert matrix[sender][receiver] == pytest.approx(expected, rel=0.005, abs=1024), (sender, receiver, matrix)
    assert sum(wire.by_rank()) == wire.total


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def test_bytes_are_counted_exactly_and_per_connection() -> None:
    one, other = _pair()
    with one, other:
        one.sendall(b"x" * 100)
        with WireBytes() as wire:
            one.sendall(b"x" * 12345)
            other.sendall(b"y" * 77)
        assert sorted(wire.by_connection.values()) == [77, 12345]
        assert wire.total == 12345 + 77
        sent = {connection.local.port: num_bytes for connection, num_bytes in bytes_sent().items()}
        assert sent[one.getsockname()[1]] == 12445


def test_a_connection_that_is_opened_inside_counts_in_full() -> None:
    with WireBytes() as wire:
        one, other = _pair()
        one.sendall(b"x" * 10)
    with one, other:
        assert wire.total == 10


def test_a_connection_that_is_closed_inside_is_an_error() -> None:
    one, other = _pair()
    with other, pytest.raises(RuntimeError, match="closed while its bytes were counted"), WireBytes():
        one.close()


def test_a_peer_that_does_not_read_is_an_error() -> None:
    from stratagem.measure import wire

    one, other = _pair()
    with one, other:
        one.settimeout(0.1)
        with pytest.raises(TimeoutError):
            one.sendall(bytes(2**26))
        with pytest.raises(RuntimeError, match="does not read"):
            wire._flushed(patience=0.05)


def test_another_system_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(RuntimeError, match="Linux"):
        bytes_sent()
