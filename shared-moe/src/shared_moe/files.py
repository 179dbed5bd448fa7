"""Writing files so that nothing of the user's is lost: temporary file, flush, rename; one writer per folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from shared_moe.errors import BusyError, DiskFullError


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on failure it is removed.

    Raises `DiskFullError` when the disk fills up; an earlier file at `path` stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as f:
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{path}: no space left on the disk; free some and run again") from e
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def folder_lock(folder: Path | str) -> Iterator[None]:
    """Hold `folder` for this process. Raises `BusyError` at once when another process holds it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as e:
        raise BusyError(
            f"{folder}: another process is writing here; wait for it or choose another folder"
        ) from e
