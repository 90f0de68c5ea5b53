"""The commands ``run`` and ``verify``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..console import print_json, progress, say, table
from ..errors import OK, VERIFICATION_FAILED
from ..units import format_bytes
from .options import running_options, seed, spilling_options, threads, whole_number
from .shown import verdict


def add_parsers(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add both to the commands."""
    run = commands.add_parser(
        "run", parents=[common, spilling_options(), running_options()], help="train for some steps; loss, time and measured peak of the same run"
    )
    run.add_argument("artifact", metavar="DIR", type=Path)
    run.add_argument("--steps", type=whole_number(1), default=10, help="default 10")
    run.add_argument("--data", metavar="FILE.npz", type=Path, help="an array for each input and label, samples first; left out, random data")
    run.add_argument(
        "--partial",
        choices=("drop", "wrap"),
        default="drop",
        help="the last, partial batch of an epoch: left out, or filled from the next epoch",
    )
    run.add_argument("--lr", type=float, default=None, metavar="RATE", help="learning rate (default: the artifact's)")
    run.add_argument("--lr-schedule", choices=("constant", "linear", "cosine"), default="constant", help="how the rate falls over the steps")
    run.add_argument("--warmup", type=whole_number(), default=0, metavar="STEPS", help="over which the rate rises at first (default 0)")
    run.add_argument(
        "--accumulate", type=whole_number(1), default=1, metavar="N", help="batches whose gradients are averaged for one step (default 1)"
    )
    run.add_argument("--clip-grad-norm", type=float, default=None, metavar="NORM", help="scale gradients down to this norm (default: the artifact's)")
    run.add_argument("--threads", type=threads, default=None, help="intra-op threads (default: the artifact's)")
    run.add_argument("--seed", type=seed, default=None, help="of dropout masks and random data (default: masks differ from run to run)")
    run.add_argument("--save", metavar="DIR", type=Path, help="write the trained state here")
    run.add_argument("--uncapped", action="store_true", help="do not hold the step within the plan's memory")
    run.set_defaults(run=_run)

    verify = commands.add_parser(
        "verify",
        parents=[common, spilling_options(), running_options()],
        help="compare an artifact with its unscheduled step, bit for bit, and with torch",
    )
    verify.add_argument("artifact", metavar="DIR", type=Path)
    verify.add_argument("--steps", type=whole_number(1), default=3, help="default 3")
    verify.add_argument("--seed", type=seed, default=0, help="of batches and dropout masks (default 0)")
    verify.set_defaults(run=_verify)


def _cuda(artifact: Any, options: argparse.Namespace) -> Any:
    """The GPU that options of ``run`` and ``verify`` name, or the artifact's; None for the CPU."""
    from ..api import parse_cuda

    provider = options.provider or artifact.provider
    if artifact.cuda is not None and provider == "cuda" and not (options.provider_option or options.allow_cpu_nodes):
        return artifact.cuda
    kept = [f"{key}={value}" for key, value in artifact.manifest.get("provider_options", {}).items()] if provider == "cuda" else []
    return parse_cuda(provider, [*kept, *options.provider_option], options.allow_cpu_nodes)


def _run(options: argparse.Namespace) -> int:
    from ..artifact import Artifact
    from ..runtime.rates import rate_schedule
    from ..runtime.run import file_batches, make_trainer, run_artifact
    from ..runtime.trainer import random_batches

    artifact = Artifact.load(options.artifact)
    batches = file_batches(options.data, [*artifact.inputs, *artifact.labels], options.partial, options.seed or 0) if options.data else None
    if batches is None and options.seed is not None:
        batches = random_batches([*artifact.inputs, *artifact.labels], options.seed)
    rate = artifact.optimizer.learning_rate if options.lr is None else options.lr
    trainer = make_trainer(
        artifact,
        _cuda(artifact, options),
        threads=int(artifact.manifest["threads"]) if options.threads is None else options.threads,
        capped=not options.uncapped,
        seed=options.seed,
        schedule=rate_schedule(options.lr_schedule, rate, options.steps, options.warmup),
        clip_grad_norm=options.clip_grad_norm,
        spill_dir=options.spill_dir,
    )
    tell = progress(options)
    result = run_artifact(
        artifact,
        options.steps,
        batches,
        trainer=trainer,
        accumulate=options.accumulate,
        on_step=lambda n, loss, s: tell(f"step {n + 1}: loss {loss:.4f}, {s:.3f} s"),
    )
    if options.save:
        trainer.save(options.save)
    if options.json:
        print_json(asdict(result))
        return OK
    memory = artifact.manifest["memory"]
    steady = sorted(result.step_seconds[1:] or result.step_seconds)
    table(
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
    from ..artifact import Artifact
    from ..spill import spilling_to
    from ..verification import verify_artifact

    artifact = Artifact.load(options.artifact)
    cuda = _cuda(artifact, options)
    with spilling_to(options.spill_dir):
        result = asdict(verify_artifact(artifact, steps=options.steps, seed=options.seed, cuda=cuda, provider=options.provider))
    if options.json:
        print_json(result)
    else:
        say(verdict(result))
        if result["reason"]:
            say(result["reason"])
    return OK if result["passed"] else VERIFICATION_FAILED
