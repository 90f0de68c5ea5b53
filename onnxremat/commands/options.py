"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..targets import PROVIDERS

__all__ = ["Parser", "common_options", "model_options", "planning_options", "running_options", "spilling_options"]

STRATEGIES = (
    "auto, keep_all, chen_sqrt, chen_greedy, griewank, rotor, mincut_knapsack, checkmate_lp, checkmate_ilp, moccasin or "
    "swap_only (default auto); "
    "those for chains also as NAME_ap, at articulation points, and NAME_linear; plan takes all, which compares them"
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> Any:
        """Raises UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")


def _moves(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of moves")
    return int(text)


def common_options() -> Parser:
    """What every command takes."""
    parser = Parser(add_help=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def model_options() -> Parser:
    """A source, and how it is exported."""
    parser = Parser(add_help=False)
    parser.add_argument(
        "source", metavar="SOURCE", help="package.module:factory or 'package.module:factory(width=32)', zoo:NAME, or a forward .onnx file"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE[:DTYPE[:HIGH]]",
        help="a batch input, such as x=8x3x224x224 or ids=2x128:int64:30522; repeatable",
    )
    parser.add_argument("--label", action="append", default=[], metavar="NAME=SHAPE[:DTYPE[:HIGH]]", help="a label; left out, as the loss needs it")
    parser.add_argument(
        "--loss", metavar="NAME[:OPTION=VALUE,...]", help="cross_entropy, mse, l1, bce_with_logits; left out, the model's own scalar output"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the factory's weights and of planning (default 0)")
    parser.add_argument("--freeze", action="append", default=[], metavar="PATTERN", help="parameters not to train, such as 'backbone.*'; repeatable")
    parser.add_argument(
        "--train-mode", action="store_true", help="of a .onnx file: turn inference BatchNormalization and Dropout into their training forms"
    )
    return parser


def planning_options() -> Parser:
    """Into what to plan, and how."""
    parser = Parser(add_help=False)
    parser.add_argument(
        "--budget",
        metavar="SIZE|PERCENT|min",
        help="512MiB, or 60%% of the unscheduled step's peak (everything the step holds), or min, the smallest that is found",
    )
    parser.add_argument("--strategy", default="auto", help=STRATEGIES)
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="that planning may take; of all, each (default 60)")
    parser.add_argument(
        "--work-limit",
        type=_moves,
        metavar="MOVES",
        help="that auto's search makes on each of two cores; the plan then depends on it and the seed alone where the time suffices",
    )

    parser.add_argument(
        "--swap",
        choices=("none", "disk", "host"),
        default="none",
        help="disk: swap tensors to a file where that is faster than recomputing them; host: from a GPU to the memory of its host",
    )
    parser.add_argument(
        "--swap-bandwidth", metavar="RATE[:RATE]", help="of the swap file, such as 2GiB/s, or out:in; left out, it is measured in its folder"
    )
    parser.add_argument("--swap-bytes", "--host-budget", dest="swap_bytes", metavar="SIZE", help="the most that may be swapped out at one time")
    return parser


def spilling_options() -> Parser:
    """Where swapped tensors go."""
    parser = Parser(add_help=False)
    parser.add_argument("--spill-dir", metavar="DIR", type=Path, help="folder of the swap file (default: $ONNXREMAT_SPILL_DIR, $TMPDIR or /var/tmp)")
    return parser


def running_options() -> Parser:
    """What a step runs on."""
    parser = Parser(add_help=False)
    parser.add_argument("--provider", choices=PROVIDERS, default=None, help="cuda: on a GPU (default: cpu; of an artifact, what it is for)")
    parser.add_argument(
        "--provider-option", action="append", default=[], metavar="KEY=VALUE", help="of ONNX Runtime's CUDA provider, such as device_id=1; repeatable"
    )
    parser.add_argument("--allow-cpu-nodes", action="store_true", help="run nodes that have no CUDA kernel on the CPU, instead of refusing")
    return parser
