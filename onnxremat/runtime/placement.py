"""Where a session runs its nodes: on which device, and on which of its streams.

A session writes its partition of the nodes to a file when asked, and takes one from a file; names are all that counts there, the nodes of a
stream run in the order of the graph.  By itself the runtime gives each device one stream, so copies would take turns with what computes:
nodes whose metadata name a stream (``onnxremat.copies``) get it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ..errors import RuntimeUnavailable

#: Key of a node's metadata: the stream that it runs on, where that is not the one of the ops.
STREAM = "onnxremat.stream"
#: The runtime's numbers of devices in a partition.
CPU, GPU = "0", "1"
_TYPE = "DeviceBasedPartitioner"


@dataclass(frozen=True, slots=True)
class Nodes:
    """What a model says of its nodes.

    Attributes:
        op_types: name -> operator.
        streams: name -> stream, of those that have one of their own.
    """

    op_types: Mapping[str, str]
    streams: Mapping[str, str]

    @classmethod
    def of(cls, model: str | Path | bytes) -> Nodes:
        """Of a file or its bytes; large constants beside it are not read."""
        proto = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(str(model), load_external_data=False)
        op_types: dict[str, str] = {}
        streams: dict[str, str] = {}
        unnamed: Counter[str] = Counter()
        for node in proto.graph.node:
            op_types[node.name or f"{node.op_type}{unnamed[node.op_type]}"] = node.op_type  # as the runtime names them
            unnamed[node.op_type] += not node.name
            for entry in node.metadata_props:
                if entry.key == STREAM:
                    streams[node.name] = entry.value
        return cls(op_types, streams)


def names_streams(model: str | Path | bytes) -> bool:
    """Whether nodes of a model name a stream."""
    content = model if isinstance(model, bytes) else Path(model).read_bytes()
    return STREAM.encode() in content


def with_streams(partition: Mapping[str, Any], streams: Mapping[str, str]) -> dict[str, Any]:
    """A partition in which some nodes have streams of their own, each on the device that its nodes are on."""
    rows: list[list[str]] = []
    devices: list[str] = []
    own: dict[tuple[str, str], list[str]] = {}
    for names, device in zip(partition["streams"], partition["devices"], strict=True):
        rows.append([name for name in names if name not in streams])
        devices.append(device)
        for name in names:
            if name in streams:
                own.setdefault((device, streams[name]), []).append(name)
    for (device, _), names in sorted(own.items()):
        rows.append(names)
        devices.append(device)
    kept = [k for k, names in enumerate(rows) if names]
    return {"type": _TYPE, "streams": [rows[k] for k in kept], "devices": [devices[k] for k in kept]}


def predicted(order: Sequence[str], streams: Mapping[str, str]) -> dict[str, Any]:
    """The partition of a graph all of whose nodes run on the GPU."""
    return with_streams({"streams": [list(order)], "devices": [GPU]}, streams)


def check_on_gpu(partition: Mapping[str, Any], nodes: Nodes) -> None:
    """Raise RuntimeUnavailable where nodes between those of the GPU run on the CPU, so that tensors go to the host and back.

    The runtime adds copies for them, silently.  Arithmetic on shapes runs on the CPU by design and needs none.
    """
    names = [name for stream in partition["streams"] for name in stream]
    added = [name for name in names if name not in nodes.op_types]
    if not added:
        return
    on_cpu = [n for stream, d in zip(partition["streams"], partition["devices"], strict=True) if d == CPU for n in stream if n in nodes.op_types]
    kinds = Counter(nodes.op_types[name] for name in on_cpu)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
    first = f", '{on_cpu[0]}' first" if on_cpu else ""
    raise RuntimeUnavailable(
        f"the CUDA provider leaves nodes to the CPU ({told}{first}), and the runtime added {len(added)} copies between host and GPU for them: "
        "give --allow-cpu-nodes to run it so, or --provider cpu"
    )


__all__ = ["CPU", "GPU", "STREAM", "Nodes", "check_on_gpu", "names_streams", "predicted", "with_streams"]
