"""Servers on loopback to read from: web servers with and without ranges, and a connection that can be broken."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Python's own server: it knows no ranges, and says nothing of them."""

    def log_message(self, *arguments: object) -> None:
        pass


class _Ranges(_Quiet):
    """A server with ranges, as object stores and web servers have them."""

    requests: ClassVar[list[str]] = []

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None:
            return super().do_GET()
        data = Path(self.translate_path(self.path)).read_bytes()
        part = data[int(match[1]) : int(match[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {match[1]}-{int(match[1]) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return None


@contextlib.contextmanager
def web_server(folder: Path, *, has_ranges: bool, signature: str = "", port: int = 0) -> Iterator[int]:
    """Port of a web server that serves a folder, to everyone or to those who sign."""
    handler = _Ranges if has_ranges else _Quiet

    class Signed(handler):  # type: ignore[misc, valid-type]
        def send_head(self) -> object:
            return super().send_head() if f"Signature={signature}" in self.path else self.send_error(403)

        def do_GET(self) -> None:
            super().do_GET() if f"Signature={signature}" in self.path else self.send_error(403)

    def make(*arguments: object) -> http.server.BaseHTTPRequestHandler:
        return (Signed if signature else handler)(*arguments, directory=str(folder))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), make)  # type: ignore[arg-type]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="web server")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Proxy:
    """A connection to a server that stalls or breaks after some bytes, a number of times."""

    def __init__(self, port: int) -> None:
        self.fault = ""
        """"stall" or "cut"; anything else lets all through."""
        self.times = 0
        """Connections that still fail."""
        self.after_bytes = 0
        self.num_faults = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def break_next(self, fault: str, *, times: int, after_bytes: int = 0) -> None:
        self.fault, self.times, self.after_bytes, self.num_faults = fault, times, after_bytes, 0

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                seen += len(data)
                if is_answer and self.times > 0 and seen > self.after_bytes:
                    self.times -= 1
                    self.num_faults += 1
                    if self.fault == "stall":
                        return  # the connection stays open, and silent
                    break
                target.sendall(data)
            for each in (source, target):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def breakable(port: int) -> Iterator[Proxy]:
    """A proxy in front of a server."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
