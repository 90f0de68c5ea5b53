"""Problems on disk.

A problem file is one JSON object::

    {"format": "onnxremat-problem", "version": 1, "name": ..., "unit": "seconds",
     "resident": {"parameters": BYTES, ...}, "optimizer_peak_bytes": BYTES,
     "transfer": null | {"bytes_per_second_out": ..., "bytes_per_second_in": ..., "host_bytes": ...[, "overlap": true]},
     "tensors": [{"name", "bytes", "producer", "alias_of"?, "output"?}, ...],
     "ops": [{"name", "seconds", "inputs", "outputs", "workspace_bytes"?, "phase"?, "pinned"?, "inplace"?, "writes"?,
              "recompute_inputs"?, "op_type"?}, ...]}

Keys with a question mark are left out where they hold their default.  A *plain instance* is an object with ``name`` and ``ops``, each
with ``cost`` (in a unit of its own), ``bytes`` of its one output, and ``inputs`` (indices of ops); an optional ``backward`` flag gives
the phase.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ProblemError
from .problem import Op, Problem, Tensor, Transfer

__all__ = ["load_problem", "problem_from_json", "problem_to_json", "read_json", "write_json"]

FORMAT, VERSION = "onnxremat-problem", 1


def write_json(data: object, path: str | Path) -> None:
    """Write JSON to a temporary file beside ``path`` and rename it, so that a reader sees the old file or the whole new one."""
    path = Path(path)
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: no place for another file
        path.write_text(json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, allow_nan=False, separators=(",", ":"))
            file.write("\n")
        # mkstemp makes private files; an ordinary new file follows the umask.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: str | Path, error: type[ValueError]) -> Any:
    """JSON data of a file; raises ``error``, one line, where it is missing or broken."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise error(f"{path}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: not a JSON file ({problem})") from problem


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """The problem in the format of the module's docstring."""
    tensors = []
    for tensor in problem.tensors:
        row: dict[str, Any] = {"name": tensor.name, "bytes": tensor.bytes, "producer": tensor.producer}
        if tensor.alias_of >= 0:
            row["alias_of"] = tensor.alias_of
        if tensor.output:
            row["output"] = True
        tensors.append(row)
    ops = []
    for op in problem.ops:
        row = {"name": op.name, "seconds": op.seconds, "inputs": list(op.inputs), "outputs": list(op.outputs)}
        if op.workspace_bytes:
            row["workspace_bytes"] = op.workspace_bytes
        if op.phase != "forward":
            row["phase"] = op.phase
        if op.pinned:
            row["pinned"] = op.pinned
        if op.inplace:
            row["inplace"] = [list(pair) for pair in op.inplace]
        if op.writes:
            row["writes"] = list(op.writes)
        if op.recompute_inputs is not None:
            row["recompute_inputs"] = list(op.recompute_inputs)
        if op.op_type:
            row["op_type"] = op.op_type
        ops.append(row)
    channel = problem.transfer
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": problem.name,
        "unit": problem.unit,
        "resident": dict(problem.resident),
        "optimizer_peak_bytes": problem.optimizer_peak_bytes,
        "transfer": None
        if channel is None
        else {
            "bytes_per_second_out": channel.bytes_per_second_out,
            "bytes_per_second_in": channel.bytes_per_second_in,
            "host_bytes": channel.host_bytes,
            **({"overlap": True} if channel.overlap else {}),
        },
        "tensors": tensors,
        "ops": ops,
    }


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """The checked problem that JSON data (either format) describe; raises ProblemError."""
    if not isinstance(data, Mapping):
        raise ProblemError("not a problem: expected a JSON object")
    if "format" in data:
        if data["format"] != FORMAT or data.get("version") != VERSION:
            got = f"{data['format']!r}, version {data.get('version')!r}"
            raise ProblemError(f"not a problem: expected format {FORMAT!r}, version {VERSION}, got {got}")
        read = _read_full
    elif "ops" in data:
        read = _read_plain
    else:
        raise ProblemError("not a problem: it has neither a 'format' nor a list of 'ops'")
    try:
        problem = read(data)
        problem.check()
    except KeyError as error:
        raise ProblemError(f"problem {data.get('name', '')!r}: the key {error.args[0]!r} is missing") from error
    except (TypeError, AttributeError) as error:
        raise ProblemError(f"problem {data.get('name', '')!r}: a field does not have its type: {error}") from error
    return problem


def load_problem(path: str | Path) -> Problem:
    """Read a problem file or a plain instance; raises ProblemError."""
    return problem_from_json(read_json(path, ProblemError))


def _read_full(data: Mapping[str, Any]) -> Problem:
    tensors = tuple(
        Tensor(str(row["name"]), row["bytes"], row["producer"], row.get("alias_of", -1), bool(row.get("output", False))) for row in data["tensors"]
    )
    ops = tuple(
        Op(
            name=str(row["name"]),
            seconds=row["seconds"],
            inputs=tuple(row["inputs"]),
            outputs=tuple(row["outputs"]),
            workspace_bytes=row.get("workspace_bytes", 0),
            phase=row.get("phase", "forward"),
            pinned=row.get("pinned", ""),
            inplace=tuple((a, b) for a, b in row.get("inplace", ())),
            writes=tuple(row.get("writes", ())),
            recompute_inputs=None if row.get("recompute_inputs") is None else tuple(row["recompute_inputs"]),
            op_type=row.get("op_type", ""),
        )
        for row in data["ops"]
    )
    channel = data.get("transfer")
    return Problem(
        name=str(data["name"]),
        ops=ops,
        tensors=tensors,
        resident=dict(data["resident"]),
        optimizer_peak_bytes=data.get("optimizer_peak_bytes", 0),
        transfer=None
        if channel is None
        else Transfer(channel["bytes_per_second_out"], channel["bytes_per_second_in"], channel["host_bytes"], bool(channel.get("overlap", False))),
        unit=str(data.get("unit", "seconds")),
    )


def _read_plain(data: Mapping[str, Any]) -> Problem:
    rows = data["ops"]
    for i, row in enumerate(rows):
        for source in row["inputs"]:
            if not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < len(rows):
                raise ProblemError(f"instance {data.get('name', '')!r}: op {i} reads op {source!r}, which does not exist")
    return Problem(
        name=str(data.get("name", "instance")),
        ops=tuple(
            Op(
                name=str(row.get("name", i)),
                seconds=row["cost"],
                inputs=tuple(row["inputs"]),
                outputs=(i,),
                phase="backward" if row.get("backward", False) else "forward",
            )
            for i, row in enumerate(rows)
        ),
        tensors=tuple(Tensor(str(row.get("name", i)), row["bytes"], i) for i, row in enumerate(rows)),
        resident={},
        unit="unit of the instance",
    )
