"""The ``unlearn`` command.  Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import logging
import os
import sys
from typing import Any

import typer

from benchmarks.cli import (  # noqa: F401
    apply,
    audit,
    machine,
    map,
    probe,
    rehearse,
    run,
    show,
)
from benchmarks.cli.command import app
from benchmarks.cli.options import print_error
from common.base import processes
from common.base.errors import UserError

INTERRUPTED = 130
_USAGE: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""Base of the command line's own errors; where its module lies depends on Typer's version."""


def main() -> None:
    """Entry point: what the user can mend is one line and exit code 2."""
    logging.basicConfig(level=_log_level(), format="%(message)s")
    logging.captureWarnings(True)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        processes.disconnect()
    except UserError as error:
        print_error(f"error: {error}")
        code = 2
    except _USAGE as error:
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        print_error(f"error: {error.format_message()}{hint}")
        code = 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        place = error.filename or "the store"
        print_error(f"error: {place}: {error.strerror}; mend it and run again")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print_error("interrupted; what is complete is kept, run again to continue")
    sys.exit(code)


def _log_level() -> str:
    level = os.environ.get("SF_LOG", "WARNING").upper()
    return level if level in logging.getLevelNamesMapping() else "WARNING"


if __name__ == "__main__":
    main()
