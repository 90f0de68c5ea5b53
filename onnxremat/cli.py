"""The command line: ``onnxremat`` and ``python -m onnxremat``."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .console import print_json as _print_json
from .console import progress as _progress
from .console import say as _say
from .console import table as _table
from .errors import ERROR, OK, USAGE, VERIFICATION_FAILED, BudgetInfeasible, OnnxRematError, UsageError
from .units import format_bytes

if TYPE_CHECKING:
    from .artifact import Artifact

_STRATEGIES = (
    "auto, keep_all, chen_sqrt, chen_greedy, griewank, rotor, mincut_knapsack, checkmate_lp, checkmate_ilp, moccasin or "
    "swap_only (default auto); "
    "those for chains also as NAME_ap, at articulation points, and NAME_linear; plan takes all, which compares them"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"{message}; see {self.prog} --help")


def _moves(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of moves")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    from . import cache_command
    from .targets import PROVIDERS
    from .tradeoff import cli as tradeoff
    from .zoo import cli as zoo

    parser = _Parser(prog="onnxremat", description="Fit the training of a neural network into the memory at hand.")
    parser.add_argument("--version", action="version", version=f"onnxremat {__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    model = _Parser(add_help=False)
    model.add_argument(
        "source", metavar="SOURCE", help="package.module:factory or 'package.module:factory(width=32)', zoo:NAME, or a forward .onnx file"
    )
    model.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE[:DTYPE[:HIGH]]",
        help="a batch input, such as x=8x3x224x224 or ids=2x128:int64:30522; repeatable",
    )
    model.add_argument("--label", action="append", default=[], metavar="NAME=SHAPE[:DTYPE[:HIGH]]", help="a label; left out, as the loss needs it")
    model.add_argument(
        "--loss", metavar="NAME[:OPTION=VALUE,...]", help="cross_entropy, mse, l1, bce_with_logits; left out, the model's own scalar output"
    )
    model.add_argument("--seed", type=int, default=0, help="of the factory's weights and of planning (default 0)")
    model.add_argument("--freeze", action="append", default=[], metavar="PATTERN", help="parameters not to train, such as 'backbone.*'; repeatable")
    model.add_argument(
        "--train-mode", action="store_true", help="of a .onnx file: turn inference BatchNormalization and Dropout into their training forms"
    )

    planning = _Parser(add_help=False)
    planning.add_argument(
        "--budget",
        metavar="SIZE|PERCENT|min",
        help="512MiB, or 60%% of the unscheduled step's peak (everything the step holds), or min, the smallest that is found",
    )
    planning.add_argument("--strategy", default="auto", help=_STRATEGIES)
    planning.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="that planning may take; of all, each (default 60)")
    planning.add_argument(
        "--work-limit",
        type=_moves,
        metavar="MOVES",
        help="that auto's search makes on each of two cores; the plan then depends on it and the seed alone where the time suffices",
    )

    planning.add_argument(
        "--swap",
        choices=("none", "disk", "host"),
        default="none",
        help="disk: swap tensors to a file where that is faster than recomputing them; host: from a GPU to the memory of its host",
    )
    planning.add_argument(
        "--swap-bandwidth", metavar="RATE[:RATE]", help="of the swap file, such as 2GiB/s, or out:in; left out, it is measured in its folder"
    )
    planning.add_argument(
        "--swap-bytes", "--host-budget", dest="swap_bytes", metavar="SIZE", help="the most that may be swapped out at one time"
    )
    spilling = _Parser(add_help=False)
    spilling.add_argument(
        "--spill-dir", metavar="DIR", type=Path, help="folder of the swap file (default: $ONNXREMAT_SPILL_DIR, $TMPDIR or /var/tmp)"
    )

    running = _Parser(add_help=False)
    running.add_argument("--provider", choices=PROVIDERS, default=None, help="cuda: on a GPU (default: cpu; of an artifact, what it is for)")
    running.add_argument(
        "--provider-option", action="append", default=[], metavar="KEY=VALUE", help="of ONNX Runtime's CUDA provider, such as device_id=1; repeatable"
    )
    running.add_argument("--allow-cpu-nodes", action="store_true", help="run nodes that have no CUDA kernel on the CPU, instead of refusing")

    export = commands.add_parser("export", parents=[common, model], help="write the forward graph with training semantics")
    export.add_argument("-o", "--output", required=True, metavar="FILE.onnx", type=Path)
    export.set_defaults(run=_export)

    compile_ = commands.add_parser("compile", parents=[common, model, planning, spilling, running], help="compile a model into a training artifact")
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

    run = commands.add_parser("run", parents=[common, spilling, running], help="train for some steps; loss, time and measured peak of the same run")
    run.add_argument("artifact", metavar="DIR", type=Path)
    run.add_argument("--steps", type=int, default=10, help="default 10")
    run.add_argument("--data", metavar="FILE.npz", type=Path, help="an array for each input and label, samples first; left out, random data")
    run.add_argument(
        "--partial",
        choices=("drop", "wrap"),
        default="drop",
        help="the last, partial batch of an epoch: left out, or filled from the next epoch",
    )
    run.add_argument("--lr", type=float, default=None, metavar="RATE", help="learning rate (default: the artifact's)")
    run.add_argument("--lr-schedule", choices=("constant", "linear", "cosine"), default="constant", help="how the rate falls over the steps")
    run.add_argument("--warmup", type=int, default=0, metavar="STEPS", help="over which the rate rises at first (default 0)")
    run.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches whose gradients are averaged for one step (default 1)")
    run.add_argument("--clip-grad-norm", type=float, default=None, metavar="NORM", help="scale gradients down to this norm (default: the artifact's)")
    run.add_argument("--threads", type=int, default=None, help="intra-op threads (default: the artifact's)")
    run.add_argument("--seed", type=int, default=None, help="of dropout masks and random data (default: masks differ from run to run)")
    run.add_argument("--save", metavar="DIR", type=Path, help="write the trained state here")
    run.add_argument("--uncapped", action="store_true", help="do not hold the step within the plan's memory")
    run.set_defaults(run=_run)

    verify = commands.add_parser(
        "verify", parents=[common, spilling, running], help="compare an artifact with its unscheduled step, bit for bit, and with torch"
    )
    verify.add_argument("artifact", metavar="DIR", type=Path)
    verify.add_argument("--steps", type=int, default=3, help="default 3")
    verify.add_argument("--seed", type=int, default=0, help="of batches and dropout masks (default 0)")
    verify.set_defaults(run=_verify)

    plan = commands.add_parser("plan", parents=[common, planning, spilling], help="schedule a problem file or any ONNX training graph")
    plan.add_argument("file", metavar="FILE", type=Path, help="a problem (.json), a training graph (.onnx), or an artifact folder")
    plan.add_argument("--input", action="append", default=[], metavar="NAME=SHAPE[:DTYPE]", help="pins the dynamic dimensions of a graph's input")
    plan.add_argument("--seed", type=int, default=0)
    plan.add_argument("-o", "--output", metavar="FILE.json", type=Path, help="write the plan here")
    plan.add_argument("--save-sequence", metavar="FILE.json", type=Path, help="write the list of op indices in the order they run")
    plan.set_defaults(run=_plan)

    inspect = commands.add_parser("inspect", parents=[common], help="what an artifact holds and promises")
    inspect.add_argument("artifact", metavar="DIR", type=Path)
    inspect.set_defaults(run=_inspect)

    doctor = commands.add_parser("doctor", parents=[common], help="check this environment")
    doctor.set_defaults(run=_doctor)

    for add_parser in (cache_command.add_parser, zoo.add_parser):
        add_parser(commands, common)
    tradeoff.add_parsers(commands, common, model)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 ok, 1 error, 2 usage, 3 budget infeasible, 4 verification failed)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
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
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except Exception as error:
        code, message = explain(error)
        return _fail(message, code, debug, as_json, {}, error)


def explain(error: Exception) -> tuple[int, Exception]:
    """Exit code and message of an error that another layer than ours raised."""
    if type(error).__module__.startswith("onnxremat."):
        return ERROR, error  # exporters and scheduler have one-line errors of their own
    if isinstance(error, OSError):
        return ERROR, OnnxRematError(f"{error.filename or 'file'}: {error.strerror or error}")
    if isinstance(error, MemoryError):
        return ERROR, OnnxRematError("out of memory while compiling: use a smaller batch, or a machine with more memory")
    return ERROR, OnnxRematError(
        f"internal error ({type(error).__name__}: {' '.join(str(error).split())[:300]}); run again with --debug and report it"
    )


def _fail(error: Exception, code: int, debug: bool, as_json: bool, extra: dict[str, Any], cause: Exception | None = None) -> int:
    if debug:
        traceback.print_exception(cause or error)
    print(f"onnxremat: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
    if as_json:
        _print_json({"error": " ".join(str(error).split()), "exit_code": code, **extra})
    return code


def _export(options: argparse.Namespace) -> int:
    from .api import parse_loss, parse_specs
    from .exporters import load_source

    _progress(options)(f"exporting {options.source}")
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
        _print_json(result)
    else:
        _say(
            f"{options.output}: {nodes} nodes, {len(forward.trainable)} trainable parameters, {len(forward.state)} state tensors, loss {forward.loss}"
        )
    return OK


def _compile(options: argparse.Namespace) -> int:
    from .api import compile as compile_
    from .optimizers import Optimizer

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
        progress=_progress(options),
    )
    result = compile_figures(artifact.manifest) | {"artifact": str(options.output)}
    if options.json:
        _print_json(result)
    else:
        _print_artifact(artifact, str(options.output))
    return OK


def compile_figures(manifest: dict[str, Any]) -> dict[str, Any]:
    """The figures of a compilation under the keys that ``--json`` promises; bytes and seconds."""
    memory, time, plan = manifest["memory"], manifest["time"], manifest["plan"]
    return {
        "budget_bytes": memory["budget_bytes"],
        "peak_unscheduled_bytes": memory["peak_unscheduled_bytes"],
        "peak_predicted_bytes": memory["peak_predicted_bytes"],
        "seconds_unscheduled": time["seconds_unscheduled"],
        "seconds_predicted": time["seconds_predicted"],
        "seconds_lower_bound": time["seconds_lower_bound"],
        "strategy": plan["strategy"],
        "solve_seconds": time["solve_seconds"],
        "recomputed_ops": plan["recomputed_ops"],
        "swapped_tensors": plan["swapped_tensors"],
    }


def _print_artifact(artifact: Artifact, where: str) -> None:
    manifest = artifact.manifest
    memory, time, plan = manifest["memory"], manifest["time"], manifest["plan"]
    overhead = time["seconds_predicted"] / time["seconds_unscheduled"] - 1 if time["seconds_unscheduled"] else 0.0
    gap = time["seconds_predicted"] / time["seconds_lower_bound"] - 1 if time["seconds_lower_bound"] else 0.0
    rows = [
        ("artifact", where),
        ("budget", format_bytes(memory["budget_bytes"])),
        (
            "peak, predicted",
            f"{format_bytes(memory['peak_predicted_bytes'])} (unscheduled {format_bytes(memory['peak_unscheduled_bytes'])})",
        ),
        ("allocator", artifact.allocator),
        ("of which resident", f"{format_bytes(memory['resident_bytes'])} (parameters, gradients, optimizer, batch)"),
        ("step time, predicted", f"{time['seconds_predicted']:.4g} s, {overhead:+.1%} over unscheduled ({time['costs']} costs)"),
        ("proven gap", f"at most {gap:.1%} above the fastest plan for this budget"),
        ("recomputed ops", f"{plan['recomputed_ops']} ({plan['strategy']}, {time['solve_seconds']:.1f} s)"),
    ]
    if manifest.get("swap"):
        swap = manifest["swap"]
        away = f"{format_bytes(swap['disk_bytes'])} on disk; runs where onnxremat.spill is" if swap["kind"] == "disk" else ""
        away = away or f"{format_bytes(swap['host_bytes'])} on the host"
        told = f"{plan['swapped_tensors']} ({away})" if plan["swapped_tensors"] else "0"
        rows.append(("swapped tensors", f"{told}; {manifest['swap']['note']}" if manifest["swap"]["note"] else told))
    checked = manifest["verification"]
    if checked is None:
        rows.append(("verification", "skipped"))
    else:
        rows.append(("verification", _verdict(checked)))
    _table(rows)


def _verdict(checked: dict[str, Any]) -> str:
    torch = checked["max_relative_error_torch"]
    parts = ["bit-equal to the unscheduled step" if checked["bitwise_equal"] else "NOT bit-equal"]
    parts.append(f"{torch:.1e} from torch" if torch is not None else "not compared with torch")
    if checked["peak_measured_bytes"] is not None:
        allocator = f" ({checked['allocator']})" if checked.get("allocator") else ""
        parts.append(f"measured peak {format_bytes(checked['peak_measured_bytes'])}{allocator}")
    return ("passed: " if checked["passed"] else "FAILED: ") + ", ".join(parts)


def given_cuda(artifact: Any, options: argparse.Namespace) -> Any:
    """The GPU that options of ``run`` and ``verify`` name, or the artifact's; None for the CPU."""
    from .api import parse_cuda

    provider = options.provider or artifact.provider
    if artifact.cuda is not None and provider == "cuda" and not (options.provider_option or options.allow_cpu_nodes):
        return artifact.cuda
    kept = [f"{key}={value}" for key, value in artifact.manifest.get("provider_options", {}).items()] if provider == "cuda" else []
    return parse_cuda(provider, [*kept, *options.provider_option], options.allow_cpu_nodes)


def _run(options: argparse.Namespace) -> int:
    from .artifact import Artifact
    from .runtime.rates import rate_schedule
    from .runtime.run import file_batches, make_trainer, run_artifact
    from .runtime.trainer import random_batches

    if options.steps < 1:
        raise UsageError(f"--steps must be at least 1, not {options.steps}")
    if options.accumulate < 1:
        raise UsageError(f"--accumulate must be at least 1, not {options.accumulate}")
    artifact = Artifact.load(options.artifact)
    threads = int(artifact.manifest["threads"]) if options.threads is None else options.threads
    batches = file_batches(options.data, [*artifact.inputs, *artifact.labels], options.partial, options.seed or 0) if options.data else None
    if batches is None and options.seed is not None:
        batches = random_batches([*artifact.inputs, *artifact.labels], options.seed)
    rate = artifact.optimizer.learning_rate if options.lr is None else options.lr
    trainer = make_trainer(
        artifact,
        given_cuda(artifact, options),
        threads=threads,
        capped=not options.uncapped,
        seed=options.seed,
        schedule=rate_schedule(options.lr_schedule, rate, options.steps, options.warmup),
        clip_grad_norm=options.clip_grad_norm,
        spill_dir=options.spill_dir,
    )
    say = _progress(options)
    result = run_artifact(
        artifact,
        options.steps,
        batches,
        trainer=trainer,
        accumulate=options.accumulate,
        on_step=lambda n, loss, s: say(f"step {n + 1}: loss {loss:.4f}, {s:.3f} s"),
    )
    if options.save:
        trainer.save(options.save)
    if options.json:
        _print_json(asdict(result))
        return OK
    memory = artifact.manifest["memory"]
    steady = sorted(result.step_seconds[1:] or result.step_seconds)
    _table(
        [
            ("loss", f"{result.losses[0]:.4f} -> {result.losses[-1]:.4f} over {options.steps} steps"),
            ("step time", f"{steady[len(steady) // 2]:.4f} s (median without the first)"),
            ("peak, measured", format_bytes(result.peak_measured_bytes)),
            ("peak, predicted", format_bytes(memory["peak_predicted_bytes"])),
            ("budget", format_bytes(memory["budget_bytes"])),
            ("providers", ", ".join(result.providers)),
        ]
    )
    return OK


def _verify(options: argparse.Namespace) -> int:
    from .artifact import Artifact
    from .spill import spilling_to
    from .verification import verify_artifact

    artifact = Artifact.load(options.artifact)
    cuda = given_cuda(artifact, options)
    with spilling_to(options.spill_dir):
        result = asdict(verify_artifact(artifact, steps=options.steps, seed=options.seed, cuda=cuda, provider=options.provider))
    if options.json:
        _print_json(result)
    else:
        _say(_verdict(result))
        if result["reason"]:
            _say(result["reason"])
    return OK if result["passed"] else VERIFICATION_FAILED


def _plan(options: argparse.Namespace) -> int:
    from .costs.transfer import Swap
    from .plan_command import plan_file
    from .runtime.cuda import Cuda

    say = _progress(options)
    # A plan alone may well be for another machine, one with a GPU.
    gpu = Cuda() if options.swap == "host" else None
    swap = Swap.parse(options.swap, options.swap_bandwidth, options.swap_bytes, options.spill_dir, gpu)
    found = plan_file(options.file, options.input, options.budget, options.strategy, options.time_limit, options.seed, say, options.work_limit, swap)
    if not options.json:
        _table(found.rows())
        for line in found.table():
            _say(line)
    if found.plan is None:
        raise found.infeasible()
    if options.output:
        found.plan.save(options.output)
    if options.save_sequence:
        found.plan.save_sequence(options.save_sequence)
    if options.json:
        _print_json(found.figures())
    return OK


def _inspect(options: argparse.Namespace) -> int:
    from .artifact import Artifact

    artifact = Artifact.load(options.artifact)
    manifest = artifact.manifest
    if options.json:
        _print_json(manifest)
        return OK
    _print_artifact(artifact, str(options.artifact))
    roles = manifest["roles"]
    optimizer = manifest["optimizer"]
    _table(
        [
            ("inputs", ", ".join(manifest["inputs"])),
            ("labels", ", ".join(manifest["labels"]) or "-"),
            ("parameters", f"{len(roles['trainable'])} trainable, {len(roles['frozen'])} frozen, {len(roles['state'])} state tensors"),
            ("optimizer", f"{optimizer['name']}, learning rate {optimizer['learning_rate']:g}, update {manifest['update']}"),
            ("target", manifest["target"]),
            ("source", str(manifest["source"].get("spec") or manifest["source"].get("path") or manifest["source"].get("model"))),
        ]
    )
    _say("memory")
    for name, size in manifest["memory"]["resident"].items():
        _say(f"  {name:<18}{format_bytes(size):>12}")
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import examine

    findings = examine()
    worst = ERROR if any(f.status == "error" for f in findings) else OK
    if options.json:
        _print_json({"ok": worst == OK, "findings": [asdict(f) for f in findings]})
        return worst
    width = max(len(f.check) for f in findings)
    for f in findings:
        _say(f"{f.status:<8} {f.check:<{width}}  {f.found}")
        if f.fix:
            _say(f"{'':<8} {'':<{width}}  -> {f.fix}")
    return worst


__all__ = ["USAGE", "build_parser", "compile_figures", "explain", "main"]
