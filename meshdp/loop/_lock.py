"""A directory that one run at a time saves in."""

import os
import socket
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, which has other locks; there nobody is kept out
    fcntl = None

PATIENCE = 120.0
"""Seconds to wait for the lock of another machine: a file server keeps those of one that died
for a while (NFS: 90 s)."""


class Lock:
    """Holds `.lock` in a directory for as long as this process lives, or until `release`.

    The operating system gives it back however the process ends. Processes that were forked
    from it, such as those that read its data, do not hold it.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        # Not a file object, which would complain of a run that never closed it.
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def take(self) -> str:
        """Makes the directory and takes it; returns what is in the way, empty if nothing."""
        me = f"process {os.getpid()} on {socket.gethostname()}"
        file = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
            other = _waited(file)
            if not other:
                os.ftruncate(file, 0)
                os.pwrite(file, me.encode(), 0)
        except OSError as e:
            if file is not None:
                os.close(file)
            return f"it cannot be written to ({e.strerror})"
        if other:
            os.close(file)
            return f"{other} saves there. End it, or choose another directory"
        self._file = file
        return ""

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _waited(file: int) -> str:
    """Locks the file; returns who holds it, empty if this process does now."""
    end = time.monotonic() + PATIENCE
    while not _locked(file):
        other = os.pread(file, 1000, 0).decode(errors="replace") or "another process"
        if other.endswith(f" on {socket.gethostname()}") or time.monotonic() > end:
            return other
        time.sleep(0.5)
    return ""


def _locked(file: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both
        return False
    except OSError:
        pass  # a file system without locks: nobody is kept out
    return True
