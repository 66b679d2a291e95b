"""Files that are whole or absent: atomic writes, one clear error when the disk is full, and content hashes."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rlk.errors import UsageError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write `path` into a UsageError that says what is missing.

    Libraries written in other languages report a full disk only in their message, so the text counts too.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) in DISK_FULL or "No space left on device" in str(error):
            free = shutil.disk_usage(path.parent).free
            raise UsageError(
                f"disk full writing {path}: {free:,} bytes free there; make room or choose another directory"
            ) from error
        if isinstance(error, OSError):
            raise UsageError(f"cannot write {path}: {error.strerror or error}; check the directory") from error
        raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` for the block to write one file to.

    When the block succeeds the file is synced and takes the name `path`; when it fails the file is removed and
    whatever was at `path` stays as it was. Raises UsageError when the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with disk_errors(path):
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all. Raises UsageError when the disk is full."""
    with atomic_path(path) as temporary, open(temporary, "wb", buffering=0) as file:
        _write_all(file, data)


def append_line(path: Path, line: str) -> None:
    """Append one line to `path`, whole or not at all. Raises UsageError when the disk is full."""
    with disk_errors(path), open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            _write_all(file, line.encode() + b"\n")
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a raw write may take less than it was given, which is how a disk that fills up begins
        rest = rest[file.write(rest):]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
