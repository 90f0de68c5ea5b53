"""The command line: ``onnxremat`` and ``python -m onnxremat``."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from . import __version__
from .console import print_json
from .errors import ERROR, BudgetInfeasible, OnnxRematError, explain

__all__ = ["build_parser", "main"]

#: Who reads the results has stopped to, as ``head`` does: what a shell calls a program that SIGPIPE ended.
_BROKEN_PIPE = 141


class _Terminated(BaseException):
    """SIGTERM: what was begun is taken away again, as after Ctrl-C."""


def build_parser() -> Any:
    """The parser with all commands."""
    from .commands import cache, compile, inspect, plan, run, tradeoff, zoo
    from .commands.options import Parser, common_options, model_options

    parser = Parser(prog="onnxremat", description="Fit the training of a neural network into the memory at hand.")
    parser.add_argument("--version", action="version", version=f"onnxremat {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common, model = common_options(), model_options()
    compile.add_parsers(commands, common, model)
    run.add_parsers(commands, common)
    plan.add_parser(commands, common)
    inspect.add_parsers(commands, common)
    cache.add_parser(commands, common)
    zoo.add_parser(commands, common)
    tradeoff.add_parsers(commands, common, model)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 ok, 1 error, 2 usage, 3 budget infeasible, 4 verification failed)."""
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if argv is None:  # the program itself, whose signals are its own affair
        signal.signal(signal.SIGTERM, _terminate)
    try:
        return _delivered(_main(list(sys.argv[1:] if argv is None else argv)))
    except SystemExit as ended:  # after --help and --version
        raise SystemExit(_delivered(int(ended.code or 0))) from None


def _terminate(*_: object) -> None:
    raise _Terminated


def _main(arguments: list[str]) -> int:
    debug, as_json = "--debug" in arguments, "--json" in arguments
    try:
        options = build_parser().parse_args(arguments)
        try:
            return int(options.run(options))
        finally:
            if hasattr(options, "console"):
                options.console.close()
    except BudgetInfeasible as error:
        return _fail(error, error.exit_code, debug, as_json, {"feasible": False, "minimum_budget_bytes": error.minimum_budget_bytes})
    except OnnxRematError as error:
        return _fail(error, error.exit_code, debug, as_json, {})
    except KeyboardInterrupt:
        return _fail(OnnxRematError("interrupted"), 128 + signal.SIGINT, False, as_json, {})
    except _Terminated:
        return _fail(OnnxRematError("terminated"), 128 + signal.SIGTERM, False, as_json, {})
    except BrokenPipeError:
        return _BROKEN_PIPE
    except Exception as error:
        code, message = explain(error)
        return _fail(message, code, debug, as_json, {}, error)


def _delivered(code: int) -> int:
    """The exit code, once all results have left; another one where stdout takes no more."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at its end
        if isinstance(error, BrokenPipeError):
            return _BROKEN_PIPE
        print(f"onnxremat: can't write to stdout: {error.strerror}", file=sys.stderr)  # noqa: T201
        return ERROR
    return code


def _fail(error: Exception, code: int, debug: bool, as_json: bool, extra: dict[str, Any], cause: Exception | None = None) -> int:
    if debug:
        traceback.print_exception(cause or error)
    print(f"onnxremat: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
    if as_json:
        print_json({"error": " ".join(str(error).split()), "exit_code": code, **extra})
    return code
