"""The entry of the command ``flashmoe``. It also runs if the package ``flashmoe`` itself cannot be imported."""

from __future__ import annotations

import importlib.util
import sys

from . import install_extra, refuse_other_distributions


def main(argv: list[str] | None = None) -> int:
    """The command ``flashmoe``, with the arguments `argv` (default: the process's).

    Returns 2, after one line on standard error, if packages that it needs are missing, or if another distribution's
    files lie among the package's."""
    try:
        refuse_other_distributions()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if missing := [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]:
        told = f"error: flashmoe: expected {' and '.join(missing)}, which the command needs, found none; to install"
        print(f"{told}: {install_extra('cli')}", file=sys.stderr)
        return 2
    from flashmoe.cli import main as command

    return command(argv)
