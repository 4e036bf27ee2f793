"""Exchange of bytes between ranks on a CPU, over one Unix socket per pair of ranks.

In an exchange each rank sends every other rank its bytes and waits for theirs. All ranks take part
in the same exchanges, in the same order. A header names the exchange that the bytes belong to, so
ranks that have diverged get an error, and neither wait nor take the wrong bytes. No thread is
started, as the program may fork.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphengine.parallel.collectives.rendezvous import (
    LOOK_S,
    PAUSE_S,
    GroupError,
    Rendezvous,
    named,
)

Result = TypeVar("Result")

# The number of the exchange, its name, and its size in bytes.
_HEADER = struct.Struct("=Q16sQ")
_RANK = struct.Struct("=Q")
# Longest wait of one system call, which takes its milliseconds as an int.
_LONGEST_S = 1e6


class Exchange:
    """Connects this rank with all others, through sockets next to the file of the rendezvous.

    limit_s   seconds that this rank waits for others; a change holds from the next exchange on
    waited_s  seconds that this rank has spent in exchanges

    Raises GroupError, with their numbers, where ranks are gone or do not come within the limit.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.share, self.limit_s, self.waited_s = rendezvous.share, rendezvous.limit_s, 0.0
        self._number = 0
        self._peers: dict[int, _Peer] = {}
        try:
            self._connect(rendezvous)
        except BaseException:
            self.close()
            raise

    def swap(self, name: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send `sent[i]` to rank i, and receive rank i's bytes into `received[i]`; all tensors are
        dense and of one size.

        name  the purpose of the exchange, for messages

        Raises GroupError where a rank is gone, does not come within the limit, or is at another
        exchange. Only `close` may be called after that.
        """
        assert len(self._peers) == self.share.ranks - 1, "it is closed"
        began, own = time.perf_counter(), self.share.rank
        self._number += 1
        received[own].copy_(sent[own])
        header = _HEADER.pack(self._number, name.encode(), sent[own].nbytes)
        waiting = [*self._peers.values()]
        for peer in waiting:
            peer.begin(header, _bytes(sent[peer.rank]), _bytes(received[peer.rank]))
        deadline = began + self.limit_s
        while waiting := [peer for peer in waiting if not self._advance(peer, header)]:
            left = deadline - time.perf_counter()
            if left <= 0:
                raise GroupError(
                    f"rank {own} of {self.share.ranks} waited {self.limit_s:g} s for "
                    f"{named([peer.rank for peer in waiting])} in {_described(header)}"
                )
            _poll(waiting, left)
        self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """Close all connections: ranks that wait for this one see it."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _advance(self, peer: _Peer, header: bytes) -> bool:
        lost: OSError | None = None
        try:
            done = peer.advance()
        except OSError as error:
            lost, done = error, False
        apart = peer.told is not None and peer.told != header
        if lost is None and not apart:
            return done
        who, here = f"rank {self.share.rank} of {self.share.ranks}", _described(header)
        if peer.told is not None and apart:
            there = _described(peer.told)
            raise GroupError(f"{who} is at {here}, and rank {peer.rank} at {there}")
        raise GroupError(f"{who} lost rank {peer.rank} in {here}: {lost}") from lost

    def _connect(self, rendezvous: Rendezvous) -> None:
        """Connect to the ranks before this one, and accept connections from the ranks after it."""
        (own, ranks), file = self.share, Path(rendezvous.file)
        with _short(file.parent) as folder, socket.socket(socket.AF_UNIX) as listening:
            name = f"{folder}/{file.name}"
            listening.bind(f"{name}-{own}")
            listening.listen(ranks)
            for rank in range(own):
                peer = _Peer(rank, self._reach(f"{name}-{rank}", rank, rendezvous))
                self._peers[rank] = peer
                try:
                    peer.greet(own)
                except OSError as error:
                    raise GroupError(
                        f"rank {own} of {ranks} lost rank {rank} at the rendezvous: {error}"
                    ) from error
            while missing := sorted({*range(own + 1, ranks)} - {*self._peers}):
                left_s = partial(rendezvous.left_s, missing)
                connection, _ = _patiently(listening, listening.accept, left_s)
                greeting = _patiently(connection, partial(connection.recv, _RANK.size), left_s)
                if greeting:
                    (rank,) = _RANK.unpack(greeting)
                    self._peers[rank] = _Peer(rank, connection)
                else:
                    # The other rank is gone already.
                    connection.close()
            os.unlink(f"{name}-{own}")

    def _reach(self, name: str, rank: int, rendezvous: Rendezvous) -> socket.socket:
        """A connection to this rank, once it listens."""
        while True:
            rendezvous.left_s([rank])
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(name)
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                time.sleep(PAUSE_S)
            else:
                return connection


class _Peer:
    """The connection to another rank, and the bytes still to be sent and received over it.

    told  the header received in this exchange; None until it is complete
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self._socket = rank, connection
        connection.setblocking(False)
        self.told: bytes | None = None
        self._leaving: list[memoryview] = []
        self._arriving: list[memoryview] = []
        self._header, self._received = bytearray(_HEADER.size), 0

    def greet(self, own: int) -> None:
        """Tell the other rank who has connected. OSError where it is gone."""
        self._socket.send(_RANK.pack(own), socket.MSG_NOSIGNAL)

    def begin(self, header: bytes, sent: memoryview, received: memoryview) -> None:
        self.told, self._received = None, 0
        self._leaving = [memoryview(header), sent]
        self._arriving = [memoryview(self._header), received]

    def advance(self) -> bool:
        """Send and receive as much as possible without waiting; returns whether all is done.
        OSError where the rank is gone.
        """
        try:
            self._send()
        finally:
            # A rank that is gone may still have sent the header of its exchange.
            self._receive()
        return not (self._leaving or self._arriving)

    def _send(self) -> None:
        with suppress(BlockingIOError):
            while self._leaving:
                count = self._socket.sendmsg(self._leaving, [], socket.MSG_NOSIGNAL)
                self._leaving = _after(self._leaving, count)

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while self._arriving:
                count = self._socket.recvmsg_into(self._arriving)[0]
                if not count:
                    raise ConnectionResetError("it has closed the connection")
                self._arriving = _after(self._arriving, count)
                self._received += count
                if self._received >= _HEADER.size:
                    self.told = bytes(self._header)

    def wanted(self) -> tuple[socket.socket, int]:
        """The socket and the poll events to wait for before the next `advance`."""
        sending = select.POLLOUT if self._leaving else 0
        return self._socket, sending | (select.POLLIN if self._arriving else 0)

    def close(self) -> None:
        # A forked process may have the socket open, too.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _patiently(
    waiting: socket.socket, call: Callable[[], Result], left_s: Callable[[], float]
) -> Result:
    """The result of a call that waits for this socket, until `left_s` raises."""
    while True:
        waiting.settimeout(min(left_s(), LOOK_S))
        with suppress(TimeoutError):
            return call()


def _poll(peers: Sequence[_Peer], seconds: float) -> None:
    """Wait until a peer can advance, for at most this many seconds."""
    poll = select.poll()
    for peer in peers:
        poll.register(*peer.wanted())
    poll.poll(1e3 * min(seconds, _LONGEST_S))


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the buffers after this many bytes."""
    left = []
    for buffer in buffers:
        taken = min(count, len(buffer))
        count -= taken
        if taken < len(buffer):
            left.append(buffer[taken:])
    return left


def _bytes(tensor: Tensor) -> memoryview:
    # NumPy arrays are buffers, but Python 3.11 has no annotation that says so.
    array: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(array)


def _described(header: bytes) -> str:
    number, name, nbytes = _HEADER.unpack(header)
    return f"exchange {number}, {name.rstrip(bytes(1)).decode()} of {nbytes} bytes"


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A short name of the folder: the path of a Unix socket has 107 bytes at most."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
