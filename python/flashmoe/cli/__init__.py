"""The ``flashmoe`` command: run a layer and check it, trace one, say what this machine can run, plan memory, place
experts by their load, compile kernels, tune them, measure suites, simulate groups of GPUs, quantise checkpoints."""

from __future__ import annotations

import sys

import typer

from .._version import __version__
from ..errors import FlashMoEError
from . import balance, compile, info, measure, memory, quantize, run, simulate, trace, tune
from .console import abandon_broken_output, escape_what_cannot_be_encoded, print_error

# The class of the errors that typer raises for wrong arguments. It is not always click.UsageError, because newer
# versions of typer have their own copy of click.
_UsageError = typer.BadParameter.__base__

_INTERRUPTED = 130

app = typer.Typer(
    help="A distributed Mixture-of-Experts layer: run it, check it, plan for it.",
    add_completion=False,
    rich_markup_mode="markdown",  # the mode that fills paragraphs
    pretty_exceptions_enable=False,
)
app.command("run")(run.command)
app.command("info")(info.command)
app.command("trace")(trace.command)
app.command("memory")(memory.command)
app.command("balance")(balance.command)
app.command("compile")(compile.command)
app.command("tune")(tune.command)
app.command("simulate")(simulate.command)
app.command("bench")(measure.command)
app.command("quantize")(quantize.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flashmoe {__version__}")
        raise typer.Exit


@app.callback()
def _of_all(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version."),
) -> None:
    pass


def main(argv: list[str] | None = None) -> int:
    """Run the command line (default: the process's) and return its exit status.

    0: done, and where results were checked they are right. 1: a check failed, or a plan does not fit.
    2: the command could not run; one line on standard error says why. 130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    escape_what_cannot_be_encoded()
    try:
        status = app(argv or ["--help"], prog_name="flashmoe", standalone_mode=False) or 0
        if status == _INTERRUPTED:  # typer turns an interrupt into this status
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (FlashMoEError, _UsageError) as error:
        message = error.format_message() if isinstance(error, _UsageError) else str(error)
        print_error(message)
        return 2
    except OSError as error:  # such as a full disk
        abandon_broken_output()
        print_error(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        return 2
    except MemoryError as error:
        print_error(f"memory: expected as much as the command's sizes need, got less: {error}")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted")
        return _INTERRUPTED
