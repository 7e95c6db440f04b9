"""A real S3 server, and what can go wrong between it and its client: a proxy of bad connections, and one that answers errors."""

import contextlib
import datetime
import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[2] / ".tools" / "bin"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_REGION": "us-east-1"}


def s3_config(endpoint: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "region": "us-east-1", "path_style": True}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def _running(name: str, port: int, *arguments: str) -> Iterator[None]:
    """A tool that make builds, until it listens on its port and while the context lasts."""
    program = shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    assert program, f"{name} is missing: run `make tools`"
    process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """Port of a versitygw that keeps the bucket `runs` in `folder`, to be used with CREDENTIALS."""
    port = free_port()
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    access = ["--access", CREDENTIALS["AWS_ACCESS_KEY_ID"], "--secret", CREDENTIALS["AWS_SECRET_ACCESS_KEY"]]
    with _running("versitygw", port, *access, "--port", f"127.0.0.1:{port}", "posix", str(folder)):
        yield port


class BadLine:
    """A toxiproxy before a server. `endpoint` is its URL; `toxic` spoils every connection until `clear`."""

    def __init__(self, control: int, port: int):
        self.control, self.endpoint = f"http://127.0.0.1:{control}", f"http://127.0.0.1:{port}"

    def _ask(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.control}{path}", data, method=method)) as answer:
            return json.loads(answer.read() or b"null")

    def toxic(self, kind: str, stream: str = "upstream", toxicity: float = 1.0, **attributes: int) -> None:
        """https://github.com/Shopify/toxiproxy#toxics; `upstream` is what the client sends."""
        content = {"name": f"{kind}-{stream}", "type": kind, "stream": stream, "toxicity": toxicity, "attributes": attributes}
        self._ask("POST", "/proxies/s3/toxics", content)

    def clear(self) -> None:
        for toxic in self._ask("GET", "/proxies/s3/toxics"):
            self._ask("DELETE", f"/proxies/s3/toxics/{toxic['name']}")

    def cut(self, yes: bool = True) -> None:
        """Ends all connections and refuses new ones, or takes them again."""
        self._ask("POST", "/proxies/s3", {"enabled": not yes})


@contextlib.contextmanager
def bad_line(server: int) -> Iterator[BadLine]:
    """A proxy before the server on that port."""
    control, port = free_port(), free_port()
    with _running("toxiproxy", control, "-port", str(control)):
        line = BadLine(control, port)
        line._ask("POST", "/proxies", {"name": "s3", "listen": f"127.0.0.1:{port}", "upstream": f"127.0.0.1:{server}"})
        yield line


Trouble = Callable[[str, str], tuple[int, str] | None]


class BadServer(ThreadingHTTPServer):
    """Answers for the S3 server on `server` with the status and code that `trouble(method, path)` says, if any.

    `/credentials` is what a container's credentials endpoint is: it gives `token` out, and requests with another one
    are told that theirs has expired, where `tokens` is set.
    """

    daemon_threads = True

    def __init__(self, server: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.trouble = server, lambda method, path: None
        self.tokens, self.token, self.given = False, "first", 0
        self.asked: list[tuple[str, str]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    trouble: Trouble

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is none of ours."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # a BadServer

    def _answer(self) -> None:
        if self.path == "/credentials":
            self._give_credentials()
            return
        self.server.asked.append((self.command, self.path))
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        found = self.server.trouble(self.command, self.path)
        if self.server.tokens and self.headers.get("X-Amz-Security-Token") != self.server.token:
            found = (400, "ExpiredToken")
        if found:
            self._reply(found[0], [], f"<Error><Code>{found[1]}</Code><Message>as the test wants</Message></Error>".encode())
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        headers = {name: value for name, value in self.headers.items() if name != "Expect"}  # with the host, which is signed
        for name, value in (self._signed_without_token(headers, body) if self.server.tokens else headers).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        self._reply(answer.status, [item for item in answer.getheaders() if item[0] != "Transfer-Encoding"], content)
        connection.close()

    def _signed_without_token(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        """The S3 server knows no tokens."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        kept = {name: value for name, value in headers.items() if name not in ("X-Amz-Security-Token", "Authorization")}
        request = AWSRequest(self.command, f"{self.server.endpoint}{self.path}", kept, body)
        S3SigV4Auth(Credentials("test", "testsecret"), "s3", "us-east-1").add_auth(request)
        return dict(request.headers)

    def _give_credentials(self) -> None:
        self.server.given += 1
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        value = {"Token": self.server.token, "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ")}
        value |= {"AccessKeyId": CREDENTIALS["AWS_ACCESS_KEY_ID"], "SecretAccessKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}
        self._reply(200, [("Content-Type", "application/json")], json.dumps(value).encode())

    def _reply(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """The tests' output is not its place."""


@contextlib.contextmanager
def bad_server(server: int) -> Iterator[BadServer]:
    """A server of errors before the S3 server on that port."""
    made = BadServer(server)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
