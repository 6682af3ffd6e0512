"""The messages of clients of either store, for tests with clients that misbehave within a message."""

from __future__ import annotations

import os
import socket
import struct

SIDES = ("gloo", "symm")


def connect(port: int, limit: float = 5.0) -> socket.socket:
    """A connection whose steps time out after ``limit`` seconds each."""
    return socket.create_connection(("127.0.0.1", port), timeout=limit)


def introduced(side: str, port: int, limit: float = 5.0) -> socket.socket:
    """A connection of a client that has introduced itself to a server without a secret."""
    link = connect(port, limit)
    if side == "gloo":
        link.sendall(b"\x00" + struct.pack("<I", 0x3C85F7CE))
        return link
    _exactly(link, 8 + 1 + 32)
    link.sendall(b"symmkv1\n\x00" + os.urandom(32) + bytes(32))
    _exactly(link, 33)
    return link


def set_frame(side: str, key: bytes, value: bytes) -> bytes:
    """A complete ``set`` request."""
    if side == "gloo":
        return b"\x01" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(value)) + value
    request = (
        b"\x01" + struct.pack("<qI", 0, 1) + struct.pack("<I", len(key)) + key + struct.pack("<I", len(value)) + value
    )
    return _symm_frame(request)


def get_frame(side: str, key: bytes) -> bytes:
    """A complete ``get`` request."""
    if side == "gloo":
        return b"\x03" + struct.pack("<Q", len(key)) + key
    return _symm_frame(b"\x03" + struct.pack("<qI", 0, 1) + struct.pack("<I", len(key)) + key)


def _symm_frame(request: bytes) -> bytes:
    body = b"\x01" + struct.pack("<I", 60_000) + request
    return struct.pack("<I", len(body)) + body


def _exactly(link: socket.socket, count: int) -> None:
    while count:
        piece = link.recv(count)
        if not piece:
            raise ConnectionError("the server closed the connection")
        count -= len(piece)
