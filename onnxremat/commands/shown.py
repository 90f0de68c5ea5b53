"""How an artifact and its verification are shown."""

from __future__ import annotations

from typing import Any

from ..artifact import Artifact
from ..console import table
from ..units import format_bytes


def print_artifact(artifact: Artifact, where: str) -> None:
    """What an artifact promises, as a table."""
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
        rows.append(("verification", verdict(checked)))
    table(rows)


def verdict(checked: dict[str, Any]) -> str:
    """A verification in one line."""
    torch = checked["max_relative_error_torch"]
    parts = ["bit-equal to the unscheduled step" if checked["bitwise_equal"] else "NOT bit-equal"]
    parts.append(
        f"{torch:.1e} from torch ({checked['tolerance_torch']:.1e} is what rounding explains)" if torch is not None else "not compared with torch"
    )
    if checked["peak_measured_bytes"] is not None:
        allocator = f" ({checked['allocator']})" if checked.get("allocator") else ""
        parts.append(f"measured peak {format_bytes(checked['peak_measured_bytes'])}{allocator}")
    return ("passed: " if checked["passed"] else "FAILED: ") + ", ".join(parts)
