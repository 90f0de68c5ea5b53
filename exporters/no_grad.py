"""torch.no_grad regions become detach points of one flat graph: torch.export's own lowering forgets them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["inline_grad_regions"]

_MARK = "onnxremat.no_grad"


def inline_grad_regions(program: torch.export.ExportedProgram) -> None:
    """Inlines every set_grad_enabled region of ``program`` in place; values that leave a disabled one pass through aten.detach.

    In torch a value computed under no_grad does not require grad, which for every reader outside is the same as detaching it.
    """
    graph_module = program.graph_module
    graph = graph_module.graph
    regions = _regions(graph)
    if not regions:
        return
    while regions:
        for node in regions:
            _inline(graph_module, node)
        regions = _regions(graph)
    _detach_leaving_values(graph)
    output = next(node for node in graph.nodes if node.op == "output")
    for spec, node in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name  # the user output may have been a getitem of the region
    for name, child in list(graph_module.named_children()):
        if isinstance(child, fx.GraphModule) and not any(node.op == "get_attr" and node.target == name for node in graph.nodes):
            delattr(graph_module, name)
    graph.lint()
    graph_module.recompile()


def _regions(graph: fx.Graph) -> list[fx.Node]:
    hop = torch.ops.higher_order.wrap_with_set_grad_enabled
    return [node for node in graph.nodes if node.op == "call_function" and node.target is hop]


def _inline(root: fx.GraphModule, call: fx.Node) -> None:
    enabled, region_node, *arguments = call.args
    assert isinstance(region_node, fx.Node)
    region = getattr(root, str(region_node.target))
    graph = root.graph
    env: dict[fx.Node, Any] = {}
    feed = iter(arguments)
    results: Any = None
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(feed)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: env[n])
            elif node.op == "get_attr":
                name, i = f"inlined_{node.target}", 0
                while hasattr(root, name):
                    name, i = f"inlined_{node.target}_{i}", i + 1
                setattr(root, name, getattr(region, str(node.target)))
                env[node] = graph.get_attr(name)
                env[node].meta = dict(node.meta)
            else:
                env[node] = graph.node_copy(node, lambda n: env[n])
                env[node].meta[_MARK] = not enabled
    for user in list(call.users):
        # The region returns a tuple, read by getitem only.
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
    if not region_node.users:
        graph.erase_node(region_node)


def _detach_leaving_values(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not node.meta.get(_MARK) or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            continue
        outside = [user for user in node.users if not user.meta.get(_MARK)]
        if not outside:
            continue
        with graph.inserting_after(node):
            detached = graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = {key: node.meta[key] for key in ("val", "nn_module_stack", "stack_trace", "tensor_meta") if key in node.meta}
        for user in outside:
            user.replace_input_with(node, detached)
