# SPDX-License-Identifier: Apache-2.0
"""The background thread: order, failure, and that it goes away."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from stratagem.collectives import Worker


def test_runs_in_the_order_of_submission_in_one_thread() -> None:
    worker, seen = Worker("w"), []
    futures = [worker.submit(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(50)]
    worker.drain()
    assert all(future.done() for future in futures)
    assert seen == [(i, "w") for i in range(50)]
    worker.close()


def test_submitting_does_not_wait() -> None:
    worker, gate = Worker(), threading.Event()
    future = worker.submit(gate.wait, 10)
    assert not future.done()
    gate.set()
    assert future.result() is True
    worker.close()


def test_later_calls_fail_with_the_first_cause_at_once() -> None:
    worker, ran = Worker(), []
    first = worker.submit(int, "no number")
    second = worker.submit(ran.append, 1)
    with pytest.raises(ValueError, match="no number"):
        second.result(timeout=5)
    assert second.exception() is first.exception()
    with pytest.raises(ValueError, match="no number"):
        worker.drain()
    assert not ran
    worker.close()


def test_close_runs_what_is_queued_and_ends_the_thread() -> None:
    worker, ran = Worker("closing"), []
    worker.submit(time.sleep, 0.05)
    worker.submit(ran.append, 1)
    worker.close()
    worker.close()
    assert ran == [1]
    assert "closing" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(int)


def test_a_forgotten_worker_ends_its_thread() -> None:
    worker = Worker("forgotten")
    (thread,) = [each for each in threading.enumerate() if each.name == "forgotten"]
    del worker
    gc.collect()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_the_worker_computes_on_one_thread_and_nobody_else_is_touched() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        worker, elsewhere = Worker(), []
        assert worker.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3
        thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert elsewhere == [3]
        worker.close()
    finally:
        torch.set_num_threads(before)
