# SPDX-License-Identifier: Apache-2.0
"""Ring collectives on torch.distributed: the teaching piece of this package, and its speed.

    ring.py           who sends what to whom, as frozen data (start reading here)
    engine.py         runs any schedule over any link
    wire.py           how values look in a message: in full, bfloat16, int8 blocks
    transport.py      what the engine asks of a link
    p2p.py            a link made of torch.distributed sends and receives
    shared_memory.py  a link made of shared memory and Unix sockets; rendezvous.py opens it
    native.py         the backend's own collectives, for CUDA
    communicator.py   the one door, one per mesh axis; opening.py opens it
    objects.py        pickled objects as tensors
    worker.py         a thread that runs collectives while the main thread computes

Each rank sends to its right neighbour only: `2 (n-1)/n` of the tensor in an all-reduce, `(n-1)/n` in a reduce-scatter
or an all-gather.
"""

from stratagem.collectives.communicator import Communicator
from stratagem.collectives.opening import Transport
from stratagem.collectives.ring import chunk_bounds
from stratagem.collectives.traffic import Traffic, TrafficRecord, TrafficSnapshot
from stratagem.collectives.wire import Op, Wire
from stratagem.collectives.worker import Worker

__all__ = [
    "Communicator",
    "Op",
    "Traffic",
    "TrafficRecord",
    "TrafficSnapshot",
    "Transport",
    "Wire",
    "Worker",
    "chunk_bounds",
]
