"""The block of memory in which the large tensors of a step lie at offsets of their own (``onnxremat.placement.fixed``)."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from ..artifact import OFFSETS, Artifact
from ..emit import HELPER
from ..errors import ArtifactError
from .session import BoundSession, Options, session_with_partition, with_extra_outputs

__all__ = ["Block", "fixed_session"]


class Block:
    """Memory for tensors at the offsets of a plan; it becomes resident when it is first written to.

    A block serves one step at a time: steps that run concurrently need one each.

    Args:
        nbytes: its size.
        offsets: names of the tensors -> bytes from its beginning.
    """

    def __init__(self, nbytes: int, offsets: Mapping[str, int]) -> None:
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, nbytes, **private)  # begins at a page
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self.nbytes = nbytes
        self.offsets = dict(offsets)

    @classmethod
    def of(cls, artifact: Artifact) -> Block | None:
        """The block of an artifact's step; None where its plan needs none."""
        nbytes = int(artifact.manifest["memory"].get("block_bytes", 0))
        if not nbytes:
            return None
        offsets: dict[str, int] = json.loads(artifact.file(OFFSETS).read_text(encoding="utf-8"))
        return cls(nbytes, offsets)

    def give_back(self) -> None:
        """Let the system have the memory until the next step; what is in it is lost."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)


def fixed_session(model: Path | bytes, block: Block, options: Options) -> BoundSession:
    """A session of a scheduled step whose large tensors lie in a block, for as long as both live.

    Tensors share memory there as the order of the nodes in the file allows, so the session must run that very order.

    Raises:
        ArtifactError: the runtime would run another order, or the tensors are not those of the model.
    """
    proto = onnx.load_from_string(model if isinstance(model, bytes) else model.read_bytes())
    outputs = [value.name for value in proto.graph.output]
    known = {value.name: value.type.tensor_type for value in proto.graph.value_info}
    planned = [node.name for node in proto.graph.node if not any(entry.key == HELPER for entry in node.metadata_props)]
    foreign = block.offsets.keys() - known.keys()
    if foreign:
        raise ArtifactError(f"the model has no '{min(foreign)}', which {OFFSETS} places: compile again")
    session, partition = session_with_partition(with_extra_outputs(proto.SerializeToString(), list(block.offsets)), options)
    names = set(planned)
    if [[name for name in stream if name in names] for stream in partition["streams"]] != [planned]:
        raise ArtifactError("ONNX Runtime would run the step in another order than the plan's, by which its tensors share memory: compile again")
    bound = BoundSession(session, outputs)
    for name, offset in block.offsets.items():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(known[name].elem_type)
        shape = [dim.dim_value for dim in known[name].shape.dim]
        if not 0 <= offset <= block.nbytes - math.prod(shape) * dtype.itemsize:
            raise ArtifactError(f"'{name}' does not lie within its block of {block.nbytes} bytes: compile again")
        bound.bind_output_memory(name, dtype, shape, block.address + offset)
    return bound
