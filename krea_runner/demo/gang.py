"""A gang of ranks that average vectors over TCP. Rank 0 is the hub; as with a real all-reduce, when one rank stops, all the
others wait for it, for ever."""

import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

RENDEZVOUS_S = 60.0


class GangBroken(ConnectionError):
    """A peer is gone; the message names its rank."""


class Gang:
    """`rendezvous` is a file on the shared file system, new for each attempt: rank 0 writes there where it listens."""

    def __init__(self, rank: int, world_size: int, attempt: str, rendezvous: Path) -> None:
        self.rank, self.world_size = rank, world_size
        self._peers: dict[int, socket.socket] = {}
        if world_size == 1:
            return
        if rank == 0:
            self._accept(attempt, rendezvous)
        else:
            self._connect(attempt, rendezvous)

    def average(self, values: Sequence[float]) -> list[float]:
        """The mean over all ranks, bit for bit the same at every rank and in every run: summed in the order of ranks.

        Raises: GangBroken.
        """
        if self.world_size == 1:
            return list(values)
        if self.rank != 0:
            self._send(0, values)
            return self._receive(0, len(values))
        total = list(values)
        for peer in range(1, self.world_size):
            total = [a + b for a, b in zip(total, self._receive(peer, len(values)), strict=True)]
        mean = [value / self.world_size for value in total]
        for peer in range(1, self.world_size):
            self._send(peer, mean)
        return mean

    def broadcast(self, values: Sequence[float] | None) -> list[float]:
        """Rank 0's values, at every rank; the others pass None. Raises: GangBroken."""
        if values is not None:
            for peer in range(1, self.world_size):
                self._send(peer, [float(len(values))])
                self._send(peer, values)
            return list(values)
        (length,) = self._receive(0, 1)
        return self._receive(0, int(length))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    # ------------------------------------------------------------------------------------------------------------

    def _accept(self, attempt: str, rendezvous: Path) -> None:
        server = socket.create_server(("", 0))
        server.settimeout(RENDEZVOUS_S)
        address = {"host": os.environ.get("MASTER_ADDR", "127.0.0.1"), "port": server.getsockname()[1]}
        rendezvous.parent.mkdir(parents=True, exist_ok=True)
        partial = rendezvous.with_name(f".{rendezvous.name}.{os.getpid()}")
        partial.write_text(json.dumps(address))
        partial.replace(rendezvous)
        while len(self._peers) < self.world_size - 1:
            connection, _ = server.accept()
            connection.settimeout(RENDEZVOUS_S)
            hello = connection.makefile("rb").readline(256).decode(errors="replace").split()
            rank = int(hello[1]) if len(hello) == 2 and hello[1].isdigit() else -1
            # What is left of an earlier attempt, or a stranger, may not join.
            if hello[:1] != [attempt] or not 0 < rank < self.world_size or rank in self._peers:
                connection.close()
                continue
            self._peers[rank] = _ready(connection)
        server.close()

    def _connect(self, attempt: str, rendezvous: Path) -> None:
        deadline = time.monotonic() + RENDEZVOUS_S
        while True:
            try:
                address = json.loads(rendezvous.read_text())
                connection = socket.create_connection((address["host"], address["port"]), timeout=RENDEZVOUS_S)
                break
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise GangBroken(f"rank {self.rank}: rank 0 did not appear in {rendezvous}: {error}") from error
                time.sleep(0.02)
        connection.sendall(f"{attempt} {self.rank}\n".encode())
        self._peers[0] = _ready(connection)

    def _send(self, peer: int, values: Sequence[float]) -> None:
        try:
            self._peers[peer].sendall(struct.pack(f"<{len(values)}d", *values))
        except OSError as error:
            raise GangBroken(f"rank {self.rank}: rank {peer} is gone: {error.strerror}") from error

    def _receive(self, peer: int, count: int) -> list[float]:
        data = bytearray()
        while len(data) < 8 * count:
            try:
                part = self._peers[peer].recv(8 * count - len(data))
            except OSError as error:
                raise GangBroken(f"rank {self.rank}: rank {peer} is gone: {error.strerror}") from error
            if not part:
                raise GangBroken(f"rank {self.rank}: rank {peer} is gone: it closed the connection")
            data += part
        return list(struct.unpack(f"<{count}d", data))


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)  # no time limit: a collective waits
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
