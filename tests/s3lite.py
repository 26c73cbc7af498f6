"""An S3 server for tests, examples and benchmarks, which can be slow, lose connections and refuse, as asked.

A bucket is a folder and an object is a file in it, so tests put a dataset into a bucket by copying it. The server is a
process of its own: its time is not the client's, and it can be killed. Signatures are not computed, only looked at.

    with s3lite.serve(tmp_path / "s3") as server:            # tmp_path/s3/bucket/corpus is s3://bucket/corpus
        server.behave(latency_seconds=0.05, reset_every=20)
        ...                                                   # with server.environment as environment variables
        server.requests()                                     # what was asked, and how many bytes were sent

By hand: `python tests/s3lite.py FOLDER [--port 9000] [--latency-seconds 0.05 …]`. Price: 0.3 s of CPU per GB read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import email.utils
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

CHUNK_BYTES = 256 << 10
CONTROL = "/_s3lite"  # no bucket may be called so
ACCESS_KEY, SECRET_KEY = "penstock", "tests-only"

# The status with which S3 sends each error code.
REFUSALS = {
    "AccessDenied": 403,
    "ExpiredToken": 400,
    "InvalidAccessKeyId": 403,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How fast the server is and what goes wrong; a fault `every` N befalls each Nth transfer of an object's bytes."""

    latency_seconds: float = 0.0
    """Before each answer; and up to `jitter_seconds` more."""
    jitter_seconds: float = 0.0
    bandwidth: float = 0.0
    """Bytes a second over all connections, sent and received; 0: as fast as it goes."""
    match: str = ""
    """Only objects with this in their names suffer faults."""
    busy_every: int = 0
    """503 SlowDown."""
    reset_every: int = 0
    """The connection is reset half-way."""
    short_every: int = 0
    """The connection is closed half-way, in good order."""
    flip_every: int = 0
    """One bit arrives wrong."""
    stall_every: int = 0
    """Nothing comes for `stall_seconds`, half-way."""
    stall_seconds: float = 75.0
    slow_every: int = 0
    """The bytes come at `slow_bandwidth`."""
    slow_bandwidth: float = 1 << 20
    refusal: str = ""
    """Every request is refused with this error code of S3, after `refuse_after` more that are not."""
    refuse_after: int = 0

    @property
    def faults(self) -> dict[str, int]:
        """How often each kind of fault happens, without those that never do."""
        every = {name.removesuffix("_every"): n for name, n in vars(self).items() if name.endswith("_every")}
        return {kind: n for kind, n in every.items() if n}


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: bytes `begin` to `end` of `name`, and how many bytes of objects were sent or received for it."""

    method: str
    name: str
    status: int
    begin: int
    end: int
    num_bytes: int
    fault: str


class Server:
    """A running server, as its clients see it."""

    def __init__(self, root: Path, port: int, pid: int) -> None:
        self.root, self.port, self.pid = root, port, pid
        self.endpoint = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "eu-west-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def behave(self, **behaviour: Any) -> None:
        """Behave so from now on: what is not named is as it was at first. Counts of `every` start again."""
        self._control(json.dumps(dataclasses.asdict(Behaviour(**behaviour))).encode())

    def requests(self, method: str = "", name: str = "") -> list[Request]:
        """What was asked so far and is answered, optionally only one method, or names that contain `name`."""
        asked = [Request(*each) for each in json.loads(self._control())]
        return [each for each in asked if method in ("", each.method) and name in each.name]

    def num_bytes(self, method: str = "GET", name: str = "") -> int:
        """Bytes of objects sent (`GET`) or received (`PUT`) so far."""
        return sum(each.num_bytes for each in self.requests(method, name))

    def _control(self, body: bytes | None = None) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.endpoint + CONTROL, body, timeout=30) as answer:
            return answer.read()


@contextlib.contextmanager
def serve(root: str | os.PathLike[str], **behaviour: Any) -> Iterator[Server]:
    """A server of the folders in `root` in a process of its own, which ends with the block or with this process."""
    root = Path(root)
    (root / "bucket").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(root), "--behaviour", json.dumps(behaviour), "--until-closed"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Server(root, int(process.stdout.readline()), process.pid)
        finally:
            process.stdin.close()
            process.wait(30)


class Refused(Exception):
    """An error as S3 sends it."""

    def __init__(self, code: str, status: int | None = None) -> None:
        super().__init__(code)
        self.code, self.status = code, status or REFUSALS[code]

    @property
    def body(self) -> bytes:
        """What S3 says about it."""
        said = f"<Error><Code>{self.code}</Code><Message>{self.code} as asked</Message></Error>"
        return b'<?xml version="1.0" encoding="UTF-8"?>\n' + said.encode()


class Asked:
    """A request's line and headers, and how to read its body."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, target, _ = first.split(" ", 2)
        path, _, query = target.partition("?")
        self.name = unquote(path).lstrip("/")
        self.query = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.body_bytes = int(self.headers.get("content-length", 0))
        self.reader = reader

    def span(self, size: int) -> tuple[int, int]:
        """The bytes that a GET wants of an object of this size."""
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if not wanted:
            return 0, size
        begin, end = wanted.groups()
        span = (int(begin), min(int(end) + 1, size) if end else size) if begin else (max(0, size - int(end)), size)
        if span[0] >= span[1]:
            raise Refused("InvalidRange", 416)
        return span


class Store:
    """The server's side: answers one request after another on each connection."""

    def __init__(self, root: Path, behaviour: Behaviour) -> None:
        self.root, self.uploads = root, root.parent / f"{root.name}.uploads"
        self.log: list[Request] = []
        self._etags: dict[Path, tuple[tuple[int, int], str]] = {}
        self._numbers, self._random = itertools.count(1), random.Random(7)
        self._next_chunk = 0.0
        self.behave(behaviour)

    def behave(self, behaviour: Behaviour) -> None:
        self.behaviour, self._num_answers = behaviour, 0
        self._transfers = itertools.count(1)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the client or a fault ends the connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer(Asked(await reader.readuntil(b"\r\n\r\n"), reader), writer):
                pass
        writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can take another."""
        if f"/{asked.name}" == CONTROL:
            return await self._answer_control(asked, writer)
        body, behaviour = None, self.behaviour
        fault = self._fault_of(asked)
        self._num_answers += 1
        is_refused = behaviour.refusal and self._num_answers > behaviour.refuse_after
        if asked.headers.get("expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            body = await self._receive(asked, fault)
            await asyncio.sleep(behaviour.latency_seconds + self._random.random() * behaviour.jitter_seconds)
            if is_refused or fault == "busy":
                raise Refused(behaviour.refusal if is_refused else "SlowDown")
            if f"Credential={ACCESS_KEY}/" not in asked.headers.get("authorization", ""):
                raise Refused("InvalidAccessKeyId" if "authorization" in asked.headers else "AccessDenied")
            status, headers, content = self._act(asked, body)
        except Refused as error:
            status, headers, content = error.status, {}, error.body
        finally:
            if body is not None:
                body.unlink(missing_ok=True)
        return await self._send(asked, writer, status, headers, content, fault)

    def _fault_of(self, asked: Asked) -> str:
        is_transfer = asked.method in ("GET", "PUT") and asked.name.count("/") >= 1 and "list-type" not in asked.query
        if not is_transfer or self.behaviour.match not in asked.name:
            return ""
        number = next(self._transfers)
        return next((kind for kind, every in self.behaviour.faults.items() if number % every == 0), "")

    async def _answer_control(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        if asked.method == "POST":
            self.behave(Behaviour(**json.loads(await asked.reader.readexactly(asked.body_bytes))))
        content = json.dumps([dataclasses.astuple(each) for each in self.log]).encode()
        writer.write(_head(200, {"Content-Length": str(len(content))}) + content)
        await writer.drain()
        return True

    # Objects

    def _act(self, asked: Asked, body: Path | None) -> tuple[int, dict[str, str], bytes | Path]:
        bucket, _, key = asked.name.partition("/")
        if not (self.root / bucket).is_dir():
            raise Refused("NoSuchBucket")
        path = self.root / asked.name
        if ".." in asked.name.split("/"):
            raise Refused("InvalidURI", 400)
        if not key and body is not None:
            return 200, {}, self._delete_all(bucket, body)
        if not key:
            return 200, {}, self._list(bucket, asked)
        if asked.method == "PUT" and body is not None:
            return self._put(asked, path, body)
        if asked.method == "POST":
            return self._post(asked, path, body)
        if asked.method == "DELETE":
            if "uploadId" in asked.query:
                self._forget(asked.query["uploadId"])
            else:
                path.unlink(missing_ok=True)
            return 204, {}, b""
        return self._get(asked, path)

    def _get(self, asked: Asked, path: Path) -> tuple[int, dict[str, str], bytes | Path]:
        if not path.is_file():
            raise Refused("NoSuchKey")
        etag, size = self._etag(path), path.stat().st_size
        if asked.headers.get("if-match", etag) != etag:
            raise Refused("PreconditionFailed", 412)
        modified = email.utils.formatdate(path.stat().st_mtime, usegmt=True)
        headers = {"ETag": etag, "Last-Modified": modified, "Accept-Ranges": "bytes"}
        if asked.headers.get("if-none-match") == etag:
            return 304, headers, b""
        begin, end = asked.span(size)
        if "range" not in asked.headers:
            return 200, headers, path
        return 206, headers | {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}, path

    def _put(self, asked: Asked, path: Path, body: Path) -> tuple[int, dict[str, str], bytes]:
        digest = hashlib.md5(usedforsecurity=False)
        with body.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        upload = asked.query.get("uploadId")
        if upload is not None:
            path = self._folder_of(upload) / f"{int(asked.query['partNumber']):05}"
        else:
            current = self._etag(path) if path.is_file() else None
            wants_none = asked.headers.get("if-none-match") == "*" and current is not None
            if wants_none or asked.headers.get("if-match", current) != current:
                raise Refused("PreconditionFailed", 412)
        path.parent.mkdir(parents=True, exist_ok=True)
        body.rename(path)
        etag = self._remember(path, digest.hexdigest())
        return 200, {"ETag": etag}, b""

    def _post(self, asked: Asked, path: Path, body: Path | None) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in asked.query:
            upload = f"upload{next(self._numbers)}-{os.getpid()}"
            (self.uploads / upload).mkdir(parents=True)
            return 200, {}, _xml("InitiateMultipartUploadResult", UploadId=upload, Key=asked.name)
        upload = asked.query["uploadId"]
        folder, whole = self._folder_of(upload), self.uploads / f"{upload}.whole"
        assert body is not None
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.read_text())]
        digest = hashlib.md5(usedforsecurity=False)
        with whole.open("wb") as file:
            for part in (folder / f"{number:05}" for number in numbers):
                if not part.is_file():
                    raise Refused("InvalidPart", 400)
                digest.update(bytes.fromhex(self._etag(part).strip('"')))
                file.write(part.read_bytes())
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.rename(path)
        etag = self._remember(path, f"{digest.hexdigest()}-{len(numbers)}")
        self._forget(upload)
        return 200, {}, _xml("CompleteMultipartUploadResult", Key=asked.name, ETag=etag)

    def _folder_of(self, upload: str) -> Path:
        folder = self.uploads / Path(upload).name
        if not folder.is_dir():
            raise Refused("NoSuchUpload", 404)
        return folder

    def _forget(self, upload: str) -> None:
        folder = self._folder_of(upload)
        for part in folder.iterdir():
            part.unlink()
        folder.rmdir()

    def _delete_all(self, bucket: str, body: Path) -> bytes:
        keys = [unescape(key) for key in re.findall("<Key>(.*?)</Key>", body.read_text())]
        for key in keys:
            (self.root / bucket / key).unlink(missing_ok=True)
        gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return f"<DeleteResult>{gone}</DeleteResult>".encode()

    def _list(self, bucket: str, asked: Asked) -> bytes:
        """All names with the prefix, in one page."""
        prefix, delimiter = asked.query.get("prefix", ""), asked.query.get("delimiter", "")
        found, groups = "", set()
        for path in sorted(each for each in (self.root / bucket).rglob("*") if each.is_file()):
            key = str(path.relative_to(self.root / bucket))
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                groups.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            said = f"<Key>{escape(key)}</Key><Size>{path.stat().st_size}</Size><ETag>{escape(self._etag(path))}</ETag>"
            found += f"<Contents>{said}<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(group)}</Prefix></CommonPrefixes>" for group in sorted(groups)
        )
        head = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{head}{found}</ListBucketResult>".encode()

    def _etag(self, path: Path) -> str:
        """What S3 calls this version: the MD5 of what was put; for a file that was copied here, when it was."""
        stat = path.stat()
        facts = (stat.st_mtime_ns, stat.st_size)
        known = self._etags.get(path)
        return known[1] if known is not None and known[0] == facts else f'"{facts[0]:x}-{facts[1]:x}"'

    def _remember(self, path: Path, digest: str) -> str:
        stat = path.stat()
        self._etags[path] = ((stat.st_mtime_ns, stat.st_size), f'"{digest}"')
        return f'"{digest}"'

    # Bytes

    async def _receive(self, asked: Asked, fault: str) -> Path | None:
        """The body in a file, checked against the SHA-256 that was signed."""
        if not asked.body_bytes and asked.method != "PUT":
            return None
        self.uploads.mkdir(exist_ok=True)
        path, digest, left = self.uploads / f"body{next(self._numbers)}", hashlib.sha256(), asked.body_bytes
        try:
            with path.open("wb") as file:
                while left:
                    if fault in ("reset", "short") and left <= asked.body_bytes // 2:
                        raise ConnectionResetError
                    chunk = await asked.reader.readexactly(min(CHUNK_BYTES, left))
                    left -= len(chunk)
                    await self._take_turn(len(chunk), fault)
                    chunk = _flipped(chunk) if fault == "flip" and not left else chunk
                    digest.update(chunk)
                    file.write(chunk)
        except BaseException:
            path.unlink()
            raise
        finally:
            if asked.method == "PUT":
                taken = asked.body_bytes - left
                self.log.append(Request("PUT", asked.name, 0 if left else 200, 0, asked.body_bytes, taken, fault))
        signed = asked.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if re.fullmatch("[0-9a-f]{64}", signed) and signed != digest.hexdigest():
            path.unlink()
            raise Refused("XAmzContentSHA256Mismatch", 400)
        return path

    async def _send(
        self,
        asked: Asked,
        writer: asyncio.StreamWriter,
        status: int,
        headers: Mapping[str, str],
        content: bytes | Path,
        fault: str,
    ) -> bool:
        begin, end = (0, len(content)) if isinstance(content, bytes) else asked.span(content.stat().st_size)
        writer.write(_head(status, {**headers, "Content-Length": str(end - begin)}))
        if asked.method == "HEAD" or end == begin or isinstance(content, bytes):
            if asked.method != "PUT":
                self.log.append(Request(asked.method, asked.name, status, begin, end, 0, fault))
            writer.write(b"" if asked.method == "HEAD" or isinstance(content, Path) else content)
            await writer.drain()
            return True
        num_sent, is_whole = 0, False
        try:
            with content.open("rb") as file:
                async for num_bytes in self._send_file(writer, file, begin, end, fault):
                    num_sent += num_bytes
            is_whole = num_sent == end - begin
            if not is_whole and fault == "reset":
                writer.transport.abort()
        finally:
            self.log.append(Request(asked.method, asked.name, status, begin, end, num_sent, fault))
        return is_whole

    async def _send_file(self, writer: asyncio.StreamWriter, file: BinaryIO, begin: int, end: int, fault: str) -> Any:
        loop, middle, place = asyncio.get_running_loop(), (begin + end) // 2, begin
        is_paced = bool(self.behaviour.bandwidth or fault)
        await writer.drain()
        while place < end:
            if place >= middle and fault in ("reset", "short"):
                return
            if place >= middle and fault == "stall":
                await asyncio.sleep(self.behaviour.stall_seconds)
                fault = ""
            num_bytes = min(CHUNK_BYTES, max(1, (end - begin) // 4), end - place) if is_paced else end - place
            await self._take_turn(num_bytes, fault)
            if fault == "flip" and place + num_bytes == end:
                file.seek(place)
                writer.write(_flipped(file.read(num_bytes)))
                await writer.drain()
            else:
                if writer.transport.is_closing():
                    return
                await loop.sendfile(writer.transport, file, place, num_bytes)
            place += num_bytes
            yield num_bytes

    async def _take_turn(self, num_bytes: int, fault: str) -> None:
        """Wait until the line has room for so many bytes."""
        if fault == "slow":
            await asyncio.sleep(num_bytes / self.behaviour.slow_bandwidth)
        elif self.behaviour.bandwidth:
            now = asyncio.get_running_loop().time()
            self._next_chunk = max(self._next_chunk, now) + num_bytes / self.behaviour.bandwidth
            await asyncio.sleep(self._next_chunk - now)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} S", "Server: s3lite", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _xml(kind: str, **fields: str) -> bytes:
    inside = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    return f"<{kind}>{inside}</{kind}>".encode()


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


async def _run(root: Path, port: int, behaviour: Behaviour, until_closed: bool) -> None:
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(Store(root, behaviour).converse, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    if until_closed:
        loop.add_reader(sys.stdin.fileno(), stopped.set)
    await stopped.wait()
    os._exit(0)  # open connections are no reason to wait


def _main() -> None:
    parser = argparse.ArgumentParser(description="An S3 server for tests; a bucket is a folder in FOLDER.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--behaviour", type=json.loads, default={}, help="as JSON: " + ", ".join(vars(Behaviour())))
    parser.add_argument("--until-closed", action="store_true", help="end when standard input does")
    given = parser.parse_args()
    asyncio.run(_run(given.folder, given.port, Behaviour(**given.behaviour), given.until_closed))


if __name__ == "__main__":
    _main()
