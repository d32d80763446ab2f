"""Files of copies, sent between hosts: over TCP, by processes that know the run's secret."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

_CHUNK = 32 << 20
_NAME = re.compile(r"[0-9a-z]+(\.[0-9a-z]+)*")
_BACKLOG = 64


def new_secret() -> str:
    """Returns a secret that the processes of a run share."""
    return secrets.token_hex(32)


def own_address(coordinator: str | None) -> str:
    """Returns the address under which the others reach this host: that of the way to process 0."""
    host = (coordinator or "127.0.0.1:0").rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)
        family, kind, _, _, place = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


class Server:
    """Keeps files for others, and gives them parts of its own.

    Args:
        folder: where the files are.
        address: the address to listen on.
        secret: what the others must know.
    """

    def __init__(self, folder: Path, address: str, secret: str) -> None:
        self.folder, self._secret = folder, secret.encode()
        family = "AF_INET"
        self._listener = Listener((address, 0), family, _BACKLOG, authkey=self._secret)
        self.address: tuple[str, int] = (address, int(self._listener.address[1]))
        self._closed = False
        threading.Thread(target=self._run, name="shardwise-copies", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception:  # a stranger, or one that was lost meanwhile
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(EOFError, OSError, ValueError, KeyError):
            while True:
                asked = json.loads(connection.recv_bytes(1 << 16))
                path = self.folder / _checked(asked["name"])
                if asked["do"] == "put":
                    part = path.with_name(f".{path.name}")
                    with part.open("wb") as file:
                        left = int(asked["size"])
                        while left > 0:
                            left -= file.write(connection.recv_bytes(_CHUNK))
                    part.replace(path)
                    connection.send_bytes(b"kept")
                else:
                    with path.open("rb") as file:
                        file.seek(int(asked["offset"]))
                        for _, piece in _pieces(file, int(asked["size"])):
                            connection.send_bytes(piece)


def _pieces(file: object, size: int) -> Iterator[tuple[int, bytes]]:
    while size > 0:
        piece = file.read(min(size, _CHUNK))  # type: ignore[attr-defined]
        if not piece:
            raise EOFError
        size -= len(piece)
        yield size, piece


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a copy")
    return name


class Peer:
    """A connection to the server of another process."""

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._connection = Client(address, "AF_INET", authkey=secret.encode())

    def put(self, path: Path) -> None:
        """Sends a file, and returns once it is kept."""
        size = path.stat().st_size
        asked = {"do": "put", "name": path.name, "size": size}
        self._connection.send_bytes(json.dumps(asked).encode())
        with path.open("rb") as file:
            for _, piece in _pieces(file, size):
                self._connection.send_bytes(piece)
        if self._connection.recv_bytes(16) != b"kept":
            raise OSError(f"{path.name} was not kept")

    def get(self, name: str, offset: int, size: int) -> bytes:
        """Returns a part of a file."""
        asked = {"do": "get", "name": name, "offset": offset, "size": size}
        self._connection.send_bytes(json.dumps(asked).encode())
        found = bytearray()
        while len(found) < size:
            found += self._connection.recv_bytes(_CHUNK)
        return bytes(found)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
