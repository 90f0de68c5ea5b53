"""Final names of graph inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

__all__ = ["final_names", "rename_values", "unique_name"]


def unique_name(wanted: str, taken: set[str]) -> str:
    """``wanted``, or the first of ``wanted_1``, ``wanted_2``, ... that is free; the result is taken from then on."""
    name, i = wanted, 0
    while name in taken:
        i += 1
        name = f"{wanted}_{i}"
    taken.add(name)
    return name


def final_names(outputs: Sequence[str], state: Sequence[str], inputs: Sequence[str], model: ir.Model) -> tuple[list[str], list[str]]:
    """Names of the model's outputs (as torch's keys and fields) and of the state outputs (``<buffer>.next``), clear of all others."""
    taken = set(inputs) | set(model.graph.initializers)
    return [unique_name(name, taken) for name in outputs], [unique_name(f"{name}.next", taken) for name in state]


def rename_values(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Gives graph inputs and outputs their names, in place.

    An output that is an input, an initializer or a second output of the same value gets an Identity of its own; any other value that
    bears one of the names makes way.
    """
    graph = model.graph
    seen: set[ir.Value] = set()
    for i, value in enumerate(list(graph.outputs)):
        if value.producer() is None or value in seen:
            node = ir.Node("", "Identity", [value], name=f"node_{outputs[i]}")
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.append(node)
            graph.outputs[i] = node.outputs[0]
        seen.add(graph.outputs[i])
    ends = {*graph.inputs, *graph.outputs}
    taken = {*inputs, *outputs, *(str(name) for name in graph.initializers)}
    for node in graph:
        for value in node.outputs:
            if value in ends or not value.name:
                continue
            value.name = unique_name(str(value.name), taken)
    wanted = {*inputs, *outputs}
    for name, initializer in list(graph.initializers.items()):
        if name in wanted:  # a constant of the exporter's: parameters and buffers were avoided by final_names
            del graph.initializers[name]
            initializer.name = unique_name(name, taken)
            graph.initializers[initializer.name] = initializer
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = name
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    names: set[str] = set()
    for node in graph:
        node.name = unique_name(f"node_{node.outputs[0].name}" if not node.name else str(node.name), names)
