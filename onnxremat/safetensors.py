"""Tensors in a file that any language reads in a few lines: the safetensors format.

Eight bytes hold the length of a JSON header (little-endian), the header says of each tensor dtype, shape and where its bytes lie behind the
header, then come the bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_NAMES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
#: Larger headers are refused by other readers.
_LARGEST_HEADER = 100_000_000


def save_tensors(arrays: Mapping[str, Array], path: Path) -> None:
    """Write arrays under their names. Raises ValueError for a dtype that the format does not have."""
    codes = {dtype: name for name, dtype in _NAMES.items()}
    header: dict[str, Any] = {}
    start = 0
    for name, array in arrays.items():
        if array.dtype not in codes:
            raise ValueError(f"'{name}' has dtype {array.dtype}, which a checkpoint can't hold")
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data if array.dtype != _NAMES["BF16"] else np.ascontiguousarray(array).tobytes())


def load_tensors(path: Path) -> dict[str, Array]:
    """The arrays of a file, by name. Raises ValueError where it is not whole."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(size))
        data = file.read()
    arrays: dict[str, Array] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, (begin, end) = _NAMES[entry["dtype"]], entry["data_offsets"]
        if end > len(data):
            raise ValueError(f"{path} ends within '{name}'")
        arrays[name] = np.frombuffer(data[begin:end], dtype).reshape(entry["shape"]).copy()
    return arrays
