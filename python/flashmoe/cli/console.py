"""The terminal that all commands write to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

console = Console(highlight=False)
_errors = Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """One line, in red, on standard error, whatever the message contains."""
    _errors.print(Text(f"error: {' '.join(message.split())}", style="red"), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner and the time that has passed, for as long as the block runs; leave nothing behind."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def count(number: int, thing: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
