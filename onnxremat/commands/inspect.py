"""The commands ``inspect`` and ``doctor``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..console import print_json, say, table
from ..errors import ERROR, OK
from ..units import format_bytes
from .shown import print_artifact


def add_parsers(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add both to the commands."""
    inspect = commands.add_parser("inspect", parents=[common], help="what an artifact holds and promises")
    inspect.add_argument("artifact", metavar="DIR", type=Path)
    inspect.set_defaults(run=_inspect)

    doctor = commands.add_parser("doctor", parents=[common], help="check this environment")
    doctor.set_defaults(run=_doctor)


def _inspect(options: argparse.Namespace) -> int:
    from ..artifact import Artifact

    artifact = Artifact.load(options.artifact)
    manifest = artifact.manifest
    if options.json:
        print_json(manifest)
        return OK
    print_artifact(artifact, str(options.artifact))
    roles = manifest["roles"]
    optimizer = manifest["optimizer"]
    table(
        [
            ("inputs", ", ".join(manifest["inputs"])),
            ("labels", ", ".join(manifest["labels"]) or "-"),
            ("parameters", f"{len(roles['trainable'])} trainable, {len(roles['frozen'])} frozen, {len(roles['state'])} state tensors"),
            ("optimizer", f"{optimizer['name']}, learning rate {optimizer['learning_rate']:g}, update {manifest['update']}"),
            ("target", manifest["target"]),
            ("source", str(manifest["source"].get("spec") or manifest["source"].get("path") or manifest["source"].get("model"))),
        ]
    )
    say("memory")
    for name, size in manifest["memory"]["resident"].items():
        say(f"  {name:<18}{format_bytes(size):>12}")
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from ..doctor import examine

    findings = examine()
    worst = ERROR if any(f.status == "error" for f in findings) else OK
    if options.json:
        print_json({"ok": worst == OK, "findings": [asdict(f) for f in findings]})
        return worst
    width = max(len(f.check) for f in findings)
    for f in findings:
        say(f"{f.status:<8} {f.check:<{width}}  {f.found}")
        if f.fix:
            say(f"{'':<8} {'':<{width}}  -> {f.fix}")
    return worst
