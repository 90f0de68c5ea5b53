"""The commands ``export`` and ``compile``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..console import print_json, progress, say
from ..errors import OK
from .options import planning_options, running_options, step_settings, swapping_options, training_options
from .shown import print_artifact


def add_parsers(commands: Any, common: argparse.ArgumentParser, model: argparse.ArgumentParser) -> None:
    """Add both to the commands; ``model`` has the options that name a model."""
    export = commands.add_parser("export", parents=[common, model], help="write the forward graph with training semantics")
    export.add_argument("-o", "--output", required=True, metavar="FILE.onnx", type=Path)
    export.set_defaults(run=_export)

    compile_ = commands.add_parser(
        "compile",
        parents=[common, model, planning_options(), swapping_options(), training_options(), running_options()],
        help="compile a model into a training artifact",
    )
    compile_.add_argument("-o", "--output", required=True, metavar="DIR", type=Path)
    compile_.add_argument("--activation-budget", metavar="PERCENT", help="instead of --budget: all that is resident plus this share of the rest")
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

    artifact = compile_(
        options.source,
        options.output,
        inputs=options.input,
        labels=options.label,
        loss=options.loss,
        budget=options.budget,
        activation_budget=options.activation_budget,
        strategy=options.strategy,
        time_limit=options.time_limit,
        work_limit=options.work_limit,
        seed=options.seed,
        freeze=options.freeze,
        train_mode=options.train_mode,
        verify=not options.no_verify,
        **step_settings(options),
        progress=progress(options),
    )
    result = compile_figures(artifact.manifest) | {"artifact": str(options.output)}
    if options.json:
        print_json(result)
    else:
        print_artifact(artifact, str(options.output))
    return OK
