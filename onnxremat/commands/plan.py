"""The command ``plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..console import print_json, progress, say, table
from ..errors import OK
from .options import planning_options, seed, swapping_options


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add it to the commands."""
    plan = commands.add_parser(
        "plan", parents=[common, planning_options(), swapping_options()], help="schedule a problem file or any ONNX training graph"
    )
    plan.add_argument("file", metavar="FILE", type=Path, help="a problem (.json), a training graph (.onnx), or an artifact folder")
    plan.add_argument("--input", action="append", default=[], metavar="NAME=SHAPE[:DTYPE]", help="pins the dynamic dimensions of a graph's input")
    plan.add_argument("--seed", type=seed, default=0, help="of planning (default 0)")
    plan.add_argument("-o", "--output", metavar="FILE.json", type=Path, help="write the plan here")
    plan.add_argument("--save-sequence", metavar="FILE.json", type=Path, help="write the list of op indices in the order they run")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from ..costs.transfer import Swap
    from ..plan_file import plan_file
    from ..runtime.cuda import Cuda

    tell = progress(options)
    # A plan alone may well be for another machine, one with a GPU.
    gpu = Cuda() if options.swap == "host" else None
    swap = Swap.parse(options.swap, options.swap_bandwidth, options.swap_bytes, options.spill_dir, gpu)
    found = plan_file(options.file, options.input, options.budget, options.strategy, options.time_limit, options.seed, tell, options.work_limit, swap)
    if not options.json:
        table(found.rows())
        for line in found.table():
            say(line)
    if found.plan is None:
        raise found.infeasible()
    if options.output:
        found.plan.save(options.output)
    if options.save_sequence:
        found.plan.save_sequence(options.save_sequence)
    if options.json:
        print_json(found.figures())
    return OK
