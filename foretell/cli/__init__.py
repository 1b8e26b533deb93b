"""The command line: commands are found by their files, and are quick to start.

What is asked for goes to standard output, everything else to standard error. No command imports
torch before it needs it, so that `foretell methods` and `--help` answer at once.

Exit codes:

    0    done
    1    a claim or a request failed
    2    the input was wrong, or a file cannot be read or written; one line says which
    130  interrupted
    141  the reader of the output has left, as in `foretell methods | head -1`
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import foretell
from foretell.cli._commands import command_group
from foretell.cli._input import check_arguments
from foretell.cli._options import split_specs
from foretell.cli._output import CURE, abandon, emit, message, refusals, warned_in_lines
from foretell.errors import ForetellError

__all__ = ["app", "main", "run", "split_specs"]

INTERRUPTED = 130  # 128 and the number of the signal, as shells have it
READER_LEFT = 141

app = command_group(__name__, Path(__file__).parent, foretell.__doc__)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        emit(f"foretell {foretell.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point: runs the command and exits."""
    code = run()
    gc.freeze()  # at the end of a process nobody needs the seconds of looking through a model
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a user's mistake is one line on stderr."""
    try:
        code = _invoke(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:
            with refusals("standard output"):
                sys.stdout.flush()
        return code
    except ForetellError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        text = error.format_message()  # empty where typer has shown the help already
        return _fail(f"{text} (see --help)", 2) if text else 2
    except BrokenPipeError:
        abandon(sys.stdout, sys.stderr)
        return READER_LEFT
    except SystemExit as request:  # what rich makes of a closed pipe
        if not isinstance(request.__context__, BrokenPipeError):
            raise
        abandon(sys.stdout, sys.stderr)
        return READER_LEFT
    except (KeyboardInterrupt, typer.Abort) as stop:
        message(str(stop) or "interrupted")
        return INTERRUPTED
    except UnicodeEncodeError as error:
        text = error.object[error.start]
        return _fail(
            f"standard output takes {error.encoding} text, which has no {text!a}; "
            "set PYTHONIOENCODING=utf-8",
            2,
        )
    except OSError as error:
        place = error.filename or "the operating system refused to read or write"
        return _fail(f"{place}: {error.strerror or error}; {CURE}", 2)


@functools.cache
def _build_command() -> Any:
    """The command with all below it, which takes a while to put together."""
    return typer.main.get_command(app)


def _invoke(arguments: list[str]) -> int:
    """Typer's own way to run a command catches closed pipes and interrupts; this one does not."""
    check_arguments(arguments)
    command = _build_command()
    try:
        with warned_in_lines(), command.make_context("foretell", arguments) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as request:  # after --help and --version
        return request.exit_code


def _fail(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # standard error may be closed or full as well
        message(f"error: {text}")
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        abandon(sys.stdout)
    return code
