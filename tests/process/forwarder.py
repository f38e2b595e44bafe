"""A network between a worker and its server that can be made to swallow everything, or be cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Forwarder:
    """Passes on TCP connections to a server. It hears the server's end, and the client's."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        """``connect`` opens a connection to the server."""
        self._connect = connect
        self._flows = threading.Event()
        self._flows.set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Let nothing through, while every connection stays open: a partition without a word."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    def cut(self) -> None:
        """End every connection that there is."""
        ends, self._open = self._open, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Stop listening, and end what there is."""
        self._flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # it listens no more
                return
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            for ends in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pass_on, args=ends)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                target.sendall(data)
            self._flows.wait()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
