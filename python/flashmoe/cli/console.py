"""The terminal that all commands write to."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

console = Console(highlight=False)
_errors = Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """One line, in red, on standard error, whatever the message contains."""
    with suppress(OSError):  # if standard error cannot be written, only the exit status is left
        _errors.print(Text(f"error: {' '.join(message.split())}", style="red"), soft_wrap=True)


def escape_what_cannot_be_encoded() -> None:
    """Print characters that standard output's encoding does not have as escapes. A path may have any characters, and a
    terminal need not be UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def abandon_broken_output() -> None:
    """If standard output cannot be written any more, send what is still buffered to the null device. Otherwise the
    interpreter would try to write it once more as it ends, print a traceback and change the exit status."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner and the time that has passed, for as long as the block runs; leave nothing behind."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def count(number: int, thing: str, things: str | None = None) -> str:
    """`1 token`, `2 tokens`; `things` is the plural, if it is not `thing` with an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
