"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..limits import LARGEST_SEED, MOST_THREADS, require_seconds, require_whole
from ..targets import PROVIDERS

if TYPE_CHECKING:
    from ..optimizers import Optimizer

__all__ = [
    "Parser",
    "common_options",
    "model_options",
    "planning_options",
    "running_options",
    "search_options",
    "seconds",
    "seed",
    "spilling_options",
    "step_settings",
    "swapping_options",
    "threads",
    "training_options",
    "whole_number",
]

STRATEGIES = (
    "auto, keep_all, chen_sqrt, chen_greedy, griewank, rotor, mincut_knapsack, checkmate_lp, checkmate_ilp, moccasin or "
    "swap_only (default auto); "
    "those for chains also as NAME_ap, at articulation points, and NAME_linear; plan takes all, which compares them"
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours, and which takes options by their full names only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As of the base class, but what is unknown is told here, where the command is known; raises UsageError."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest

    def error(self, message: str) -> Any:
        """Raises UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")


def whole_number(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes a whole number within limits."""
    return _type(int, "whole number", lambda number: require_whole("it", number, least, most))


def _type(convert: Callable[[str], Any], name: str, require: Callable[[Any], None]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            number = convert(text)
            require(number)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a {name}") from None
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return number

    return read


#: The type of an option that takes a time limit.
seconds = _type(float, "number of seconds", lambda number: require_seconds("it", number))
#: Types of options that several commands have.
seed, threads = whole_number(most=LARGEST_SEED), whole_number(most=MOST_THREADS)


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
    parser.add_argument("--seed", type=seed, default=0, help="of the factory's weights and of planning (default 0)")
    parser.add_argument("--freeze", action="append", default=[], metavar="PATTERN", help="parameters not to train, such as 'backbone.*'; repeatable")
    parser.add_argument(
        "--train-mode", action="store_true", help="of a .onnx file: turn inference BatchNormalization and Dropout into their training forms"
    )
    return parser


def planning_options() -> Parser:
    """Into what to plan, and how."""
    parser = Parser(add_help=False, parents=[search_options()])
    parser.add_argument(
        "--budget",
        metavar="SIZE|PERCENT|min",
        help="512MiB, or 60%% of the unscheduled step's peak (everything the step holds), or min, the smallest that is found",
    )
    return parser


def search_options() -> Parser:
    """How to plan."""
    parser = Parser(add_help=False)
    parser.add_argument("--strategy", default="auto", help=STRATEGIES)
    parser.add_argument("--time-limit", type=seconds, default=60.0, metavar="SECONDS", help="that planning may take; of all, each (default 60)")
    parser.add_argument(
        "--work-limit",
        type=whole_number(),
        metavar="MOVES",
        help="that auto's search makes on each of two cores; the plan then depends on it and the seed alone where the time suffices",
    )
    return parser


def swapping_options() -> Parser:
    """Which tensors may be swapped, and where to."""
    parser = Parser(add_help=False, parents=[spilling_options()])
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


def training_options(costs: str = "measured") -> Parser:
    """How a step trains and what it is compiled for; ``costs`` is the default of ``--costs``."""
    parser = Parser(add_help=False)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--lr", type=float, default=None, metavar="RATE", help="initial learning rate (default 0.001 for adamw, 0.01 for sgd)")
    parser.add_argument("--momentum", type=float, default=0.0, help="of sgd (default 0)")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="default 0")
    parser.add_argument(
        "--no-decay",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that weight decay leaves alone, such as '*.bias', or vectors for all biases and scales of normalizations; repeatable",
    )
    parser.add_argument(
        "--clip-grad-norm", type=float, default=0.0, metavar="NORM", help="scale gradients down to this global norm (default: leave them)"
    )
    parser.add_argument(
        "--update",
        choices=("separate", "fused"),
        default="separate",
        help="fused: each parameter is updated as soon as its gradient is complete, which is not kept (default separate)",
    )
    parser.add_argument("--threads", type=threads, default=0, help="intra-op threads of the training; 0 is ONNX Runtime's default")
    parser.add_argument(
        "--costs",
        choices=("measured", "analytic"),
        default=costs,
        help=f"profile this machine, or a model of FLOPs and bytes for another (default {costs})",
    )
    parser.add_argument(
        "--conv-layout",
        choices=("auto", "nchwc", "nchw"),
        default="auto",
        help="nchwc: convolutions in the blocked layout, faster, runs on x86-64 only; nchw: runs everywhere; auto: what suits this machine",
    )
    parser.add_argument(
        "--target",
        choices=("ort-training", "onnxruntime"),
        default="ort-training",
        help="ort-training: onnxruntime-training 1.19.2; onnxruntime: any ONNX Runtime, standard operators only (default ort-training)",
    )
    return parser


def _optimizer(options: argparse.Namespace) -> Optimizer:
    from ..optimizers import Optimizer

    return Optimizer(
        options.optimizer,
        learning_rate=options.lr if options.lr is not None else {"adamw": 1e-3, "sgd": 1e-2}[options.optimizer],
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        no_decay=tuple(options.no_decay),
        clip_grad_norm=options.clip_grad_norm,
        update=options.update,
    )


def step_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``onnxremat.compile`` from the options of training, swapping and running."""
    return {
        "optimizer": _optimizer(options),
        "threads": options.threads,
        "costs": options.costs,
        "conv_layout": options.conv_layout,
        "target": options.target,
        "swap": options.swap,
        "swap_bandwidth": options.swap_bandwidth,
        "swap_bytes": options.swap_bytes,
        "spill_dir": None if options.spill_dir is None else str(options.spill_dir.absolute()),
        "provider": options.provider or "cpu",
        "provider_options": options.provider_option,
        "allow_cpu_nodes": options.allow_cpu_nodes,
    }


def running_options() -> Parser:
    """What a step runs on."""
    parser = Parser(add_help=False)
    parser.add_argument("--provider", choices=PROVIDERS, default=None, help="cuda: on a GPU (default: cpu; of an artifact, what it is for)")
    parser.add_argument(
        "--provider-option", action="append", default=[], metavar="KEY=VALUE", help="of ONNX Runtime's CUDA provider, such as device_id=1; repeatable"
    )
    parser.add_argument("--allow-cpu-nodes", action="store_true", help="run nodes that have no CUDA kernel on the CPU, instead of refusing")
    return parser
