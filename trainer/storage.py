"""A run's folder on a local disk or in S3, behind one small interface.

boto3 is the only S3 client of the project: it alone finds every kind of AWS credentials (Pod Identity, IRSA,
refreshed sessions) and takes a custom endpoint and path-style addressing, and s3transfer moves large files in
parallel parts. Keys are `/`-separated and relative to the folder.
"""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from trainer.config import InputError, StorageConfig, refusing

PART_BYTES = 16 * 2**20  # of a file in S3, sent or fetched in parallel by that many connections
CONNECTIONS = 16


class Storage(Protocol):
    """What a run needs of the place it is kept in. A missing key raises FileNotFoundError."""

    uri: str

    def read(self, key: str) -> bytes: ...

    def read_version(self, key: str) -> tuple[bytes, str]:
        """The content, and its `version`."""
        ...

    def write(self, key: str, data: bytes | memoryview, if_absent: bool = False, if_version: str | None = None) -> bool:
        """Writes all or nothing; says False and writes nothing where a key that shall be absent, or of a version, is not."""
        ...

    def list(self, prefix: str = "") -> dict[str, int]:
        """Keys below `prefix` with their sizes in bytes."""
        ...

    def delete(self, keys: Iterable[str]) -> None: ...

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


def open_storage(uri: str, config: StorageConfig) -> Storage:
    """The storage at `uri`, with `config`'s endpoint, region and addressing."""
    if not uri.startswith("s3://"):
        return LocalStorage(uri)
    with refusing(f"storage: no S3 client can be made for {uri}", "mend storage.endpoint_url, storage.region or AWS_PROFILE"):
        return S3Storage(uri, config)


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


class LocalStorage:
    def __init__(self, root: str):
        self.uri = root
        self.root = Path(root).expanduser()

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def read_version(self, key: str) -> tuple[bytes, str]:
        data = self.read(key)
        return data, hashlib.sha256(data).hexdigest()

    def write(self, key: str, data: bytes | memoryview, if_absent: bool = False, if_version: str | None = None) -> bool:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        if if_version is not None:
            with FileLock(target.with_name(f".tmp-{target.name}.lock")):
                try:
                    return self.version(key) == if_version and self.write(key, data)
                except FileNotFoundError:
                    return False
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".tmp-", delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not if_absent:
            os.replace(file.name, target)
            return True
        try:
            os.link(file.name, target)
            return True
        except FileExistsError:
            return False
        finally:
            os.unlink(file.name)

    def list(self, prefix: str = "") -> dict[str, int]:
        found = {}
        for path in (self.root / prefix).rglob("*"):
            if not path.name.startswith(".tmp-"):  # written, but not there yet
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

    @contextlib.contextmanager
    def local_copy(self, key: str) -> Iterator[Path]:
        yield self.root / key

    def version(self, key: str) -> str:
        with (self.root / key).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def upload(self, source: Path, key: str) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".tmp-{uuid.uuid4().hex}-{target.name}")
        shutil.move(source, partial)
        os.replace(partial, target)

    def download(self, key: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / key, target)


class S3Storage:
    def __init__(self, uri: str, config: StorageConfig):
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self.bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        # A doubled or trailing slash would be part of the key, and other tools would not find the object.
        self.prefix = "/".join(part for part in prefix.split("/") if part)
        self.uri = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=config.endpoint_url,
            region_name=config.region,
            config=Config(
                s3={"addressing_style": "path"} if config.path_style else None,
                retries={"mode": "adaptive", "total_max_attempts": 6},
                connect_timeout=10,
                max_pool_connections=CONNECTIONS,
            ),
        )
        self.transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=CONNECTIONS)

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}".strip("/") if self.prefix else key

    def read(self, key: str) -> bytes:
        return self._get(key)["Body"].read()

    def _get(self, key: str, **arguments: str) -> Any:
        try:
            return self.client.get_object(Bucket=self.bucket, Key=self._key(key), **arguments)
        except self.client.exceptions.NoSuchKey:
            raise FileNotFoundError(f"{self.uri}/{key}") from None

    def read_version(self, key: str) -> tuple[bytes, str]:
        found = self._get(key)
        return found["Body"].read(), found["ETag"].strip('"')

    def write(self, key: str, data: bytes | memoryview, if_absent: bool = False, if_version: str | None = None) -> bool:
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": f'"{if_version}"'} if if_version is not None else {}
        if len(data) > PART_BYTES and not condition:
            self.client.upload_fileobj(_View(data), self.bucket, self._key(key), Config=self.transfer)
            return True
        try:
            self.client.put_object(Bucket=self.bucket, Key=self._key(key), Body=bytes(data), **condition)
        except ClientError as error:
            # 409: another conditional write to the key is under way, so that one wins; 404: what should be replaced is gone.
            if (
                condition
                and error.response["ResponseMetadata"]["HTTPStatusCode"] in (404, 409, 412)
                and _code(error) != "NoSuchBucket"
            ):
                return False
            raise
        return True

    def list(self, prefix: str = "") -> dict[str, int]:
        base = self._key(prefix)
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{base}/" if base else "")
        skip = len(self.prefix) + 1 if self.prefix else 0
        return {item["Key"][skip:]: item["Size"] for page in pages for item in page.get("Contents", [])}

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.client.delete_object(Bucket=self.bucket, Key=self._key(key))

    @contextlib.contextmanager
    def local_copy(self, key: str) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile(prefix="ray-finetune-") as file:
            try:
                self.client.download_file(self.bucket, self._key(key), file.name, Config=self.transfer)
            except self.client.exceptions.ClientError as error:
                raise _missing(error, f"{self.uri}/{key}") from None
            yield Path(file.name)

    def version(self, key: str) -> str:
        try:
            return self.client.head_object(Bucket=self.bucket, Key=self._key(key))["ETag"].strip('"')
        except self.client.exceptions.ClientError as error:
            raise _missing(error, f"{self.uri}/{key}") from None

    def upload(self, source: Path, key: str) -> None:
        self.client.upload_file(str(source), self.bucket, self._key(key), Config=self.transfer)

    def download(self, key: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.client.download_file(self.bucket, self._key(key), str(target), Config=self.transfer)


class _View(io.RawIOBase):
    """A stream over memory that is not copied whole: s3transfer reads one part after the other from it."""

    def __init__(self, data: bytes | memoryview):
        self.data, self.at = memoryview(data), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.data)}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        part = self.data[self.at : self.at + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


def _code(error: Any) -> str:
    return error.response["Error"]["Code"]


def _missing(error: Any, uri: str) -> Exception:
    """The FileNotFoundError that an S3 error means, or the error itself."""
    gone = _code(error) in ("404", "NoSuchKey")
    return FileNotFoundError(errno.ENOENT, "No such object", uri) if gone else error
