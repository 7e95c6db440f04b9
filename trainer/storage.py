"""A run's folder on a local disk or in S3, behind one small interface.

boto3 is the only S3 client of the project: it alone finds every kind of AWS credentials (Pod Identity, IRSA,
refreshed sessions) and takes a custom endpoint and path-style addressing. Large content goes in parts, in parallel,
each tried again by itself; s3transfer would copy it once more and send it in blocks of 16 KiB, at a fifth more CPU
time. Keys are `/`-separated and relative to the folder.
"""

import base64
import contextlib
import errno
import hashlib
import mmap
import os
import random
import re
import shutil
import stat
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from filelock import FileLock

from trainer.config import InputError, StorageConfig, refusing

PART_BYTES = 16 * 2**20  # of a file in S3, sent or fetched in parallel by that many connections
CONNECTIONS = 32
MAX_PARTS = 10_000  # that S3 takes for one file
PATIENCE_SECONDS = 300.0  # for which a request that may yet succeed is sent again
LONGEST_PAUSE = 15.0  # seconds between two tries
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"}
OVERLOADED = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequestsException"}

T = TypeVar("T")


class DamagedError(OSError):
    """What is stored is not what was written."""


class Storage(Protocol):
    """What a run needs of the place it is kept in. A missing key raises FileNotFoundError."""

    uri: str

    def read(self, key: str) -> bytes: ...

    def read_version(self, key: str) -> tuple[bytes, str]:
        """The content, and its `version`."""
        ...

    def write(self, key: str, data: bytes, if_absent: bool = False, if_version: str | None = None) -> bool:
        """Writes all or nothing; says False and writes nothing where a key that shall be absent, or of a version, is not."""
        ...

    def write_large(self, key: str, pieces: Sequence[memoryview]) -> None:
        """Writes content whose pieces lie end to end, all or nothing, without a copy of the whole."""
        ...

    def list(self, prefix: str = "") -> dict[str, int]:
        """Keys below `prefix` with their sizes in bytes."""
        ...

    def delete(self, keys: Iterable[str]) -> None: ...

    def clear_unfinished(self, wanted: Callable[[str], bool]) -> None:
        """Frees the space of writes that never ended, to keys for which `wanted` holds."""
        ...

    def local_copy(self, key: str) -> contextlib.AbstractContextManager[Path]:
        """A local file with the key's content, not to be written to; it may be gone afterwards."""
        ...

    def version(self, key: str) -> str:
        """A text that is another one once the content is: a SHA-256, or an ETag."""
        ...

    def upload(self, source: Path, key: str) -> None:
        """Puts a local file there, all or nothing. The file may be gone afterwards."""
        ...

    def download(self, key: str, target: Path) -> None: ...


def open_storage(uri: str, config: StorageConfig, patience: float = PATIENCE_SECONDS) -> Storage:
    """The storage at `uri`, with `config`'s endpoint, region and addressing; `patience` in seconds is for a store in S3."""
    if not uri.startswith("s3://"):
        return LocalStorage(uri)
    with refusing(f"storage: no S3 client can be made for {uri}", "mend storage.endpoint_url, storage.region or AWS_PROFILE"):
        return S3Storage(uri, config, patience)


def check_writable(storage: Storage) -> None:
    """Writes, reads and deletes a probe; InputError says what the store answered."""
    key, data = f".probe-{os.getpid()}", os.urandom(16)
    try:
        storage.write(key, data)
        same = storage.read(key) == data
        conditional = not storage.write(key, data, if_absent=True)
        storage.delete([key])
    except Exception as error:
        raise InputError(
            f"storage.uri: cannot write to {storage.uri} ({_reason(error)}); name a folder or bucket that this run may write to"
        ) from None
    if not same:
        raise InputError(f"storage.uri: {storage.uri} returned other bytes than were written; use another store")
    if not conditional:
        what = "overwrites a key that is to be written only where it is absent (If-None-Match), so runs could not be kept apart"
        raise InputError(f"storage.uri: {storage.uri} {what}; use a store with conditional writes")


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


UNFINISHED = ".tmp-"  # begins the name of a local file that is not there yet, for a reader
PARTIAL = re.compile(r"\.tmp-\w+-(.*)")  # the rest of it: at random, and what the file will be called


class LocalStorage:
    def __init__(self, root: str):
        self.uri = root
        self.root = Path(root).expanduser()

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def read_version(self, key: str) -> tuple[bytes, str]:
        data = self.read(key)
        return data, hashlib.sha256(data).hexdigest()

    def write(self, key: str, data: bytes, if_absent: bool = False, if_version: str | None = None) -> bool:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        if if_version is not None:
            with FileLock(target.with_name(f"{UNFINISHED}{target.name}.lock")):
                try:
                    return self.version(key) == if_version and self.write(key, data)
                except FileNotFoundError:
                    return False
        with _finished(target, [memoryview(data)]) as file:
            if not if_absent:
                os.replace(file, target)
                return True
            try:
                os.link(file, target)
                return True
            except FileExistsError:
                return False

    def write_large(self, key: str, pieces: Sequence[memoryview]) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        with _finished(target, pieces) as file:
            os.replace(file, target)

    def list(self, prefix: str = "") -> dict[str, int]:
        found = {}
        for path in (self.root / prefix).rglob("*"):
            if not path.name.startswith(UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        found[str(path.relative_to(self.root))] = status.st_size
        return found

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self.root / key).unlink(missing_ok=True)
            parent = (self.root / key).parent
            while parent != self.root and parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
                parent = parent.parent

    def clear_unfinished(self, wanted: Callable[[str], bool]) -> None:
        for path in sorted(self.root.rglob("*"), reverse=True):  # what a folder holds before the folder
            key = str(path.relative_to(self.root))
            if path.is_dir() and wanted(f"{key}/"):
                with contextlib.suppress(OSError):  # it holds something
                    path.rmdir()
            elif (match := PARTIAL.fullmatch(path.name)) and wanted(key.removesuffix(path.name) + match[1]):
                self.delete([key])

    @contextlib.contextmanager
    def local_copy(self, key: str) -> Iterator[Path]:
        yield self.root / key

    def version(self, key: str) -> str:
        with (self.root / key).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def upload(self, source: Path, key: str) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{UNFINISHED}{uuid.uuid4().hex}-{target.name}")
        shutil.move(source, partial)
        os.replace(partial, target)

    def download(self, key: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / key, target)


@contextlib.contextmanager
def _finished(target: Path, pieces: Sequence[memoryview]) -> Iterator[str]:
    """Name of a file beside `target` that is safe on disk; it is gone afterwards, unless it was moved."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=UNFINISHED, suffix=f"-{target.name}", delete=False) as file:
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            yield file.name
        except OSError as error:
            error.filename = error.filename or str(target)  # of a full disk, which one
            raise
        finally:
            Path(file.name).unlink(missing_ok=True)


class S3Storage:
    def __init__(self, uri: str, config: StorageConfig, patience: float = PATIENCE_SECONDS):
        self.bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        # A doubled or trailing slash would be part of the key, and other tools would not find the object.
        self.prefix = "/".join(part for part in prefix.split("/") if part)
        self.uri = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.config, self.patience = config, patience
        self._connect()

    def _connect(self) -> None:
        """Makes the client, with the credentials of this moment."""
        import boto3
        from botocore.config import Config

        self.client: Any = boto3.Session().client(
            "s3",
            endpoint_url=self.config.endpoint_url,
            region_name=self.config.region,
            config=Config(
                s3={"addressing_style": "path"} if self.config.path_style else None,
                retries={"mode": "standard", "total_max_attempts": 3},
                connect_timeout=10,
                max_pool_connections=CONNECTIONS,
            ),
        )

    def _patiently(self, request: Callable[[], T]) -> T:
        """The answer to a request, which is sent again while the store is out of order or credentials have run out."""
        end, pause = time.monotonic() + self.patience, 0.5
        while True:
            try:
                return request()
            except Exception as error:
                if not _may_pass(error) or time.monotonic() + pause > end:
                    raise
                if _is_of_credentials(error):
                    self._connect()
            time.sleep(random.uniform(pause / 2, pause))  # not all workers at once
            pause = min(2 * pause, LONGEST_PAUSE)

    def _place(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{key}".strip("/") if self.prefix else key}

    def read(self, key: str) -> bytes:
        return self._get(key)[0]

    def read_version(self, key: str) -> tuple[bytes, str]:
        return self._get(key)

    def _get(self, key: str, **arguments: str) -> tuple[bytes, str]:
        from botocore.exceptions import FlexibleChecksumError

        def get() -> tuple[bytes, str]:
            found = self.client.get_object(**self._place(key), **arguments)
            try:
                return found["Body"].read(), found["ETag"].strip('"')
            except FlexibleChecksumError:
                raise DamagedError(f"{self.uri}/{key} does not have the checksum that it was stored with") from None

        with self._missing(key):
            return self._patiently(get)

    @contextlib.contextmanager
    def _missing(self, key: str) -> Iterator[None]:
        """Makes the error for a key that is not there FileNotFoundError."""
        from botocore.exceptions import ClientError

        try:
            yield
        except ClientError as error:
            if _code(error) in ("404", "NoSuchKey"):
                raise FileNotFoundError(errno.ENOENT, "No such object", f"{self.uri}/{key}") from None
            raise

    def write(self, key: str, data: bytes, if_absent: bool = False, if_version: str | None = None) -> bool:
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": f'"{if_version}"'} if if_version is not None else {}
        try:
            self._patiently(lambda: self.client.put_object(**self._place(key), Body=data, **condition))
        except Exception as error:
            # 409: another conditional write to the key is under way, so that one wins; 404: what should be replaced is gone.
            if condition and _status(error) in (404, 409, 412) and _code(error) != "NoSuchBucket":
                return False
            raise
        return True

    def write_large(self, key: str, pieces: Sequence[memoryview]) -> None:
        total = sum(piece.nbytes for piece in pieces)
        if total <= PART_BYTES:
            self.write(key, b"".join(pieces))
            return
        size = max(PART_BYTES, -(-total // MAX_PARTS))
        # The store compares the checksum of each part; AWS_REQUEST_CHECKSUM_CALCULATION leaves it out for stores that know none.
        checked = self.client.meta.config.request_checksum_calculation != "when_required"
        algorithm = {"ChecksumAlgorithm": "CRC32"} if checked else {}
        place = self._place(key)
        place["UploadId"] = self._patiently(lambda: self.client.create_multipart_upload(**place, **algorithm))["UploadId"]

        buffers = threading.local()  # a part's memory is its thread's next part's: new pages cost more than the copy

        def send(number: int) -> dict[str, Any]:
            length = min(size, total - (number - 1) * size)
            if len(getattr(buffers, "body", b"")) != length:
                buffers.body = bytearray(length)
            body = _cut(pieces, (number - 1) * size, buffers.body)
            checksum = {"ChecksumCRC32": base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()} if checked else {}
            part: dict[str, Any] = {"PartNumber": number, **checksum}
            return {"ETag": self._patiently(lambda: self.client.upload_part(**place, **part, Body=body))["ETag"], **part}

        try:
            parts = _in_parallel(send, range(1, 1 - (-total // size)))
            self._patiently(lambda: self.client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts}))
        except BaseException:
            with contextlib.suppress(Exception):  # what made the upload fail is the error to tell
                self.client.abort_multipart_upload(**place)
            raise

    def _pages(self, operation: str, name: str, prefix: str) -> list[dict[str, Any]]:
        """All items that a listing below `prefix` gives under `name`, each with its key relative to the folder."""
        base = self._place(prefix)["Key"]
        arguments = {"Bucket": self.bucket, "Prefix": f"{base}/" if base else ""}
        pages = self._patiently(lambda: list(self.client.get_paginator(operation).paginate(**arguments)))
        skip = len(self.prefix) + 1 if self.prefix else 0
        return [item | {"Key": item["Key"][skip:]} for page in pages for item in page.get(name, [])]

    def list(self, prefix: str = "") -> dict[str, int]:
        return {item["Key"]: item["Size"] for item in self._pages("list_objects_v2", "Contents", prefix)}

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._patiently(lambda key=key: self.client.delete_object(**self._place(key)))

    def clear_unfinished(self, wanted: Callable[[str], bool]) -> None:
        for upload in self._pages("list_multipart_uploads", "Uploads", ""):
            if wanted(upload["Key"]):
                with contextlib.suppress(self.client.exceptions.NoSuchUpload):
                    self._patiently(
                        lambda upload=upload: self.client.abort_multipart_upload(
                            **self._place(upload["Key"]), UploadId=upload["UploadId"]
                        )
                    )

    @contextlib.contextmanager
    def local_copy(self, key: str) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile(prefix="ray-finetune-") as file:
            self.download(key, Path(file.name))
            yield Path(file.name)

    def version(self, key: str) -> str:
        return self._head(key)["ETag"].strip('"')

    def _head(self, key: str) -> dict[str, Any]:
        with self._missing(key):
            return self._patiently(lambda: self.client.head_object(**self._place(key)))

    def upload(self, source: Path, key: str) -> None:
        if source.stat().st_size <= PART_BYTES:
            self.write(key, source.read_bytes())
            return
        with (
            source.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            self.write_large(key, [view])

    def download(self, key: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        found = self._head(key)
        total, version = found["ContentLength"], found["ETag"]
        with target.open("wb") as file:
            file.truncate(total)

            def fetch(start: int) -> None:
                stop = min(total, start + PART_BYTES)
                data = self._get(key, Range=f"bytes={start}-{stop - 1}", IfMatch=version)[0]
                assert os.pwrite(file.fileno(), data, start) == stop - start

            _in_parallel(fetch, range(0, total, PART_BYTES))


def _cut(pieces: Sequence[memoryview], start: int, into: bytearray) -> bytearray:
    """`into`, filled with the bytes from `start` on of the pieces laid end to end."""
    at, stop = 0, start + len(into)
    for piece in pieces:
        if at < stop and start < at + piece.nbytes:
            part = piece[max(0, start - at) : stop - at]
            into[max(0, at - start) : max(0, at - start) + part.nbytes] = part
        at += piece.nbytes
    return into


def _in_parallel(work: Callable[[int], T], numbers: range) -> list[T]:
    """`work` of each number, in their order; the first error ends it, once the requests under way have."""
    pool = ThreadPoolExecutor(CONNECTIONS)
    try:
        return list(pool.map(work, numbers))
    finally:
        pool.shutdown(cancel_futures=True)


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: the store is overloaded or out of reach, or credentials are to be renewed."""
    from botocore.exceptions import ConnectionError, HTTPClientError, IncompleteReadError

    unanswered = isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError))
    answered_badly = _status(error) >= 500 and _code(error) != "NotImplemented"
    return unanswered or answered_badly or _is_of_credentials(error) or _code(error) in OVERLOADED


def _is_of_credentials(error: Exception) -> bool:
    from botocore.exceptions import CredentialRetrievalError, NoCredentialsError

    return isinstance(error, (CredentialRetrievalError, NoCredentialsError)) or _code(error) in EXPIRED


def _code(error: Exception) -> str:
    """What S3 calls its error; nothing where it is not S3's."""
    return _answer(error).get("Error", {}).get("Code", "")


def _status(error: Exception) -> int:
    """The HTTP status of S3's error; 0 where it is not S3's."""
    return _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _answer(error: Exception) -> dict[str, Any]:
    from botocore.exceptions import ClientError

    return dict(error.response) if isinstance(error, ClientError) else {}
