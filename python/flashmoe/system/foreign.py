"""Files that anybody may have made: opened, read and parsed within bounds, and shown in messages.

Whatever is wrong with such a file is one of `REFUSALS`: an `OSError`, a `ValueError` or a `MemoryError`. The caller
turns it into an error of this package that contains its `reason`.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError

REFUSALS = (OSError, ValueError, MemoryError)

KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What a file may be, by the type bits of its mode."""

_MOST_SHOWN = 1000
"""The most characters of one part of a message."""

_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = 200
_values.maxlevel = 3


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """A regular file, open. Links are followed, because folders of checkpoints often consist of links."""
    # Without O_NONBLOCK, opening a pipe to read would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise ValueError(KINDS.get(kind, "no regular file"))
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def length(file: BinaryIO) -> int:
    """Bytes of an open file, as the file system says. A sparse file stores far fewer."""
    return os.fstat(file.fileno()).st_size


def read(path: str | Path, most: int) -> bytes:
    """The content of a regular file that has at most `most` bytes."""
    with opened(path) as file:
        has = length(file)
        if has > most:
            raise ValueError(f"{has} bytes, which are more than {most}")
        return file.read(has)


def parsed(content: bytes) -> Any:
    """The value of JSON text in UTF-8. An object that has a name twice is refused, because JSON does not say what it
    means.

    Parsing takes up to 50 times as many bytes as `content` has, if it consists of lists in lists.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"an object that has the name {shown(twice)} twice")
    return made


def is_count(value: Any, most: int = 2**63 - 1) -> bool:
    """Whether a parsed value is an integer in [0, most]; true and 1.0 are not."""
    return type(value) is int and 0 <= value <= most


def shown(value: object) -> str:
    """A parsed value as messages show it: shortened if it is long or deep."""
    return _values.repr(value)


def clipped(text: object, most: int = _MOST_SHOWN) -> str:
    """Text as messages show it. Text of more than `most` characters loses its middle. Characters that cannot be printed
    become escapes: half of a surrogate pair, for example, which JSON can hold and UTF-8 cannot."""
    start = _without_middle(str(text), most)
    printable = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in start)
    return _without_middle(printable, most)


def _without_middle(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


def reason(error: BaseException) -> str:
    """What an error of `REFUSALS` says."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, MemoryError):
        return "more than there is memory for"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def checkpoint_error(argument: str, expected: str, got: object) -> CheckpointError:
    """The package's error for a checkpoint that is not as it should be."""
    return CheckpointError(f"{clipped(argument)}: expected {clipped(expected)}, got {clipped(got)}")
