"""The commands ``export`` and ``compile``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..console import print_json, progress, say
from ..errors import OK
from .options import planning_options, running_options, spilling_options
from .shown import print_artifact


def add_parsers(commands: Any, common: argparse.ArgumentParser, model: argparse.ArgumentParser) -> None:
    """Add both to the commands; ``model`` has the options that name a model."""
    export = commands.add_parser("export", parents=[common, model], help="write the forward graph with training semantics")
    export.add_argument("-o", "--output", required=True, metavar="FILE.onnx", type=Path)
    export.set_defaults(run=_export)

    compile_ = commands.add_parser(
        "compile", parents=[common, model, planning_options(), spilling_options(), running_options()], help="compile a model into a training artifact"
    )
    compile_.add_argument("-o", "--output", required=True, metavar="DIR", type=Path)
    compile_.add_argument("--activation-budget", metavar="PERCENT", help="instead of --budget: all that is resident plus this share of the rest")
    compile_.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    compile_.add_argument("--lr", type=float, default=None, metavar="RATE", help="initial learning rate (default 0.001 for adamw, 0.01 for sgd)")
    compile_.add_argument("--momentum", type=float, default=0.0, help="of sgd (default 0)")
    compile_.add_argument("--weight-decay", type=float, default=0.0, help="default 0")
    compile_.add_argument(
        "--no-decay",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that weight decay leaves alone, such as '*.bias', or vectors for all biases and scales of normalizations; repeatable",
    )
    compile_.add_argument(
        "--clip-grad-norm", type=float, default=0.0, metavar="NORM", help="scale gradients down to this global norm (default: leave them)"
    )
    compile_.add_argument("--threads", type=int, default=0, help="intra-op threads of the training; 0 is ONNX Runtime's default")
    compile_.add_argument(
        "--costs",
        choices=("measured", "analytic"),
        default="measured",
        help="profile this machine, or a model of FLOPs and bytes for another",
    )
    compile_.add_argument(
        "--conv-layout",
        choices=("auto", "nchwc", "nchw"),
        default="auto",
        help="nchwc: convolutions in the blocked layout, faster, runs on x86-64 only; nchw: runs everywhere; auto: what suits this machine",
    )
    compile_.add_argument(
        "--target",
        choices=("ort-training", "onnxruntime"),
        default="ort-training",
        help="ort-training: onnxruntime-training 1.19.2; onnxruntime: any ONNX Runtime, standard operators only (default ort-training)",
    )
    compile_.add_argument(
        "--update",
        choices=("separate", "fused"),
        default="separate",
        help="fused: each parameter is updated as soon as its gradient is complete, which is not kept (default separate)",
    )
    compile_.add_argument("--no-verify", action="store_true", help="do not compare the numbers when done")
    compile_.set_defaults(run=_compile)


def _export(options: argparse.Namespace) -> int:
    from ..api import parse_loss, parse_specs
    from ..exporters import load_source

    progress(options)(f"exporting {options.source}")
    forward = load_source(
        options.source, parse_specs(options.input), parse_specs(options.label), parse_loss(options.loss), options.seed, options.train_mode
    )
    forward.freeze(options.freeze)
    forward.save(options.output)
    nodes = len(list(forward.model.graph))
    result = {
        "output": str(options.output),
        "nodes": nodes,
        "inputs": [str(s) for s in forward.inputs],
        "labels": [str(s) for s in forward.labels],
        "trainable": len(forward.trainable),
        "frozen": len(forward.frozen),
        "state": len(forward.state),
        "loss": forward.loss,
    }
    if options.json:
        print_json(result)
    else:
        say(
            f"{options.output}: {nodes} nodes, {len(forward.trainable)} trainable parameters, {len(forward.state)} state tensors, loss {forward.loss}"
        )
    return OK


def _compile(options: argparse.Namespace) -> int:
    from ..api import compile as compile_
    from ..artifact import compile_figures
    from ..optimizers import Optimizer

    rate = options.lr if options.lr is not None else {"adamw": 1e-3, "sgd": 1e-2}[options.optimizer]
    artifact = compile_(
        options.source,
        options.output,
        inputs=options.input,
        labels=options.label,
        loss=options.loss,
        optimizer=Optimizer(
            options.optimizer,
            learning_rate=rate,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            no_decay=tuple(options.no_decay),
            clip_grad_norm=options.clip_grad_norm,
            update=options.update,
        ),
        budget=options.budget,
        activation_budget=options.activation_budget,
        strategy=options.strategy,
        time_limit=options.time_limit,
        work_limit=options.work_limit,
        seed=options.seed,
        threads=options.threads,
        costs=options.costs,
        conv_layout=options.conv_layout,
        target=options.target,
        freeze=options.freeze,
        train_mode=options.train_mode,
        verify=not options.no_verify,
        swap=options.swap,
        swap_bandwidth=options.swap_bandwidth,
        swap_bytes=options.swap_bytes,
        spill_dir=options.spill_dir,
        provider=options.provider or "cpu",
        provider_options=options.provider_option,
        allow_cpu_nodes=options.allow_cpu_nodes,
        progress=progress(options),
    )
    result = compile_figures(artifact.manifest) | {"artifact": str(options.output)}
    if options.json:
        print_json(result)
    else:
        print_artifact(artifact, str(options.output))
    return OK
