"""A folder whose files nobody else has written: compiled kernels and measured profiles are kept in such folders.

The files' content runs on the GPU, or decides what runs there. So a folder is used only if it belongs to this process's
user or to root, and nobody else can write to it. The same holds for each of its files, which must be regular files.
Files are opened relative to the folder that was checked, never through a link. A file gets its name only when it is
complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import FlashMoEError
from .foreign import KINDS, length

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK_SECONDS = 0.05
"""Seconds between two tries of a lock that another process holds. The lock is tried because flock has no time limit."""


class Folder:
    """An open folder that was checked. `what` begins every message; `remedy` ends messages on which the user can
    act."""

    def __init__(self, descriptor: int, path: Path, what: str, remedy: str) -> None:
        self._descriptor = descriptor
        self.path = path
        self._what, self._remedy = what, remedy

    @classmethod
    @contextlib.contextmanager
    def at(cls, path: Path, what: str, remedy: str, make: bool = True) -> Iterator[Folder]:
        """The folder at `path`. If it is missing, it is made for this user alone, or without `make` `FileNotFoundError`
        is raised. Raises `FlashMoEError` if it cannot be made or opened, or if others could have put files there."""
        try:
            if make:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, _OPEN_FOLDER)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not make:
                raise
            verb = "write to" if make else "read"
            raise FlashMoEError(f"{what}: cannot {verb} {path}: {error.strerror}; {remedy}") from error
        try:
            found = os.fstat(descriptor)
            if not _is_trusted(found):
                if _is_own(found):
                    remedy = f"see that its files are yours and chmod go-w it, or {remedy}"
                raise FlashMoEError(
                    f"{what}: {path}: expected a folder of {_user(os.geteuid())} or root to which nobody else can "
                    f"write, found one of {_owner_and_mode(found)}; {remedy}"
                )
            yield cls(descriptor, path, what, remedy)
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """The names of everything in the folder, sorted."""
        return sorted(os.listdir(self._descriptor))

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """The descriptor of a file; it is closed when a program is executed. Raises `FileNotFoundError`. Raises
        `FlashMoEError` for anything but a regular file that nobody else can have written."""
        path = self.path / name
        try:
            # Without O_NONBLOCK, opening a pipe to read would wait for its other end.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
            found = os.fstat(descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                self._expect_file(path, os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))
            raise self._failed("write" if flags & os.O_CREAT else "read", path, error) from error
        try:
            self._expect_file(path, found)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, most: int | None = None) -> bytes:
        """The content of a file. Raises as `open` does, and `ValueError` if it has more than `most` bytes."""
        with open(self.open(name), "rb") as file:
            if most is not None and (has := length(file)) > most:
                raise ValueError(f"{has} bytes, which are more than {most}")
            return file.read()

    def replace(self, name: str, content: bytes) -> None:
        """Put a file with this content in place of the file `name`. At any time, a file of that name is complete.
        Raises `FlashMoEError` if the file cannot be written."""
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o644, dir_fd=self._descriptor), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException as error:
            self.remove(temporary)
            if isinstance(error, OSError):
                raise self._failed("write", self.path / name, error) from error
            raise

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content, if that is possible."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except IsADirectoryError:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)
        except OSError:
            pass

    def sweep(self, prefix: str) -> None:
        """Remove unfinished files and folders that killed processes have left, if their names begin with `prefix`. The
        caller holds the lock under which such files are made, so that no process is still making one."""
        for name in self.names():
            if name.startswith(prefix) and name.endswith(".tmp"):
                self.remove(name)

    @contextlib.contextmanager
    def temporary(self, prefix: str) -> Iterator[Folder]:
        """A new folder within this folder, for this user alone. It is removed at the end."""
        name = f"{prefix}{secrets.token_hex(8)}.tmp"
        try:
            os.mkdir(name, 0o700, dir_fd=self._descriptor)
            descriptor = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self._descriptor)
        except OSError as error:
            raise self._failed("write to", self.path, error) from error
        try:
            yield Folder(descriptor, self.path / name, self._what, self._remedy)
        finally:
            os.close(descriptor)
            self.remove(name)

    @contextlib.contextmanager
    def locked(self, name: str, seconds: float, when_held: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Hold the lock file `name`. The kernel releases it when this process ends, however it ends. Yields whether the
        lock is held: some file systems have no locks.

        Other users cannot open the file, so only processes of this user can hold the lock. If one does, this calls
        `when_held` once, waits at most `seconds`, and then raises `FlashMoEError`.
        """
        try:
            descriptor = self.open(name, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError as error:  # the folder is gone
            raise self._failed("write to", self.path, error) from error
        try:
            yield self._acquired(descriptor, name, seconds, when_held)
        finally:
            os.close(descriptor)

    def _acquired(self, descriptor: int, name: str, seconds: float, when_held: Callable[[], None]) -> bool:
        deadline = None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if deadline is None:
                    deadline = time.monotonic() + seconds
                    when_held()
                if time.monotonic() >= deadline:
                    holder = _holder(descriptor)
                    raise FlashMoEError(
                        f"{self._what}: waited {seconds:g} s for the lock {self.path / name}, which {holder} holds; "
                        "end that process if it does nothing"
                    ) from None
                time.sleep(_LOOK_SECONDS)
            except OSError:
                return False

    def _expect_file(self, path: Path, found: os.stat_result) -> None:
        if (kind := stat.S_IFMT(found.st_mode)) != stat.S_IFREG:
            what = KINDS.get(kind, "none")
            raise FlashMoEError(f"{self._what}: {path}: expected a regular file, found {what}; remove it")
        if not _is_trusted(found):
            mend = "chmod go-w it if it is as you left it, or remove it" if _is_own(found) else "remove it"
            raise FlashMoEError(
                f"{self._what}: {path}: expected a file of {_user(os.geteuid())} or root to which nobody else can "
                f"write, found one of {_owner_and_mode(found)}; {mend}"
            )

    def _failed(self, verb: str, path: Path, error: OSError) -> FlashMoEError:
        return FlashMoEError(f"{self._what}: cannot {verb} {path}: {error.strerror}; {self._remedy}")


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid()


def _is_trusted(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to this process's user or to root, and others cannot write to it. If an access
    control list (ACL) lets anybody else write, the bit for the group is set, too."""
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _owner_and_mode(found: os.stat_result) -> str:
    return f"{_user(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}"


def _user(number: int) -> str:
    """`user 1000 (ada)`; without the name if there is none."""
    try:
        return f"user {number} ({pwd.getpwuid(number).pw_name})"
    except KeyError:
        return f"user {number}"


def _holder(descriptor: int) -> str:
    """The process that holds a lock on the file, as far as the kernel says."""
    found = os.fstat(descriptor)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, locked, *_ = line.split()
            if kind == "FLOCK" and locked == file and int(process) > 0:
                return f"process {process}"
    return "another process"
