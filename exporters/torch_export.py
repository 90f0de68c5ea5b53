"""nn.Module -> ForwardGraph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .audit import audit, program_facts
from .checkpoints import mark_checkpoints
from .cleanup import clean, infer_shapes
from .embedding import looked_up_inputs, mark_padding_rows
from .errors import ExportError
from .forward_graph import IR_VERSION, OPSET, ForwardGraph, InputSpec
from .losses import Loss, append_loss
from .noop import STOP_GRADIENT
from .places import user_line
from .quiet import quiet
from .rewrites import contiguous_views, expand_copies, float_bounds, rewrite_dropouts
from .roles import final_names, rename_values
from .stop_gradient import remove_idle_detaches, shield_detaches, unshield_detaches
from .strided import resolve_strides
from .trace import TracedModule, refuse_written_parameters, trace_module, without_effect
from .translations import translation_table
from .versions import library_versions

__all__ = ["export_torch"]


def export_torch(
    module: nn.Module,
    inputs: Sequence[InputSpec | Any],
    labels: Sequence[InputSpec] = (),
    loss: Loss | str | None = None,
    seed: int = 0,
    spec: str = "",
) -> ForwardGraph:
    """Exports a module as it stands: every submodule in its own train/eval mode, its present weights as the starting point.

    The caller decides the mode: a fresh nn.Module is in training mode, and a submodule on which ``eval()`` was called stays frozen.

    Args:
        module: the model; it is not changed, and its weights are copied.
        inputs: specs, or example arrays or tensors (named after the parameters of ``forward``).
        labels: specs of the labels.  With ``loss`` given they feed the loss (and are derived when empty); without, they are further
            inputs of the model.
        loss: a :class:`Loss`, its text form, or None for the model's own scalar output when it has one (the graph has no loss
            otherwise, unless the text ``"output"`` demands one).
        seed: recorded in ``source``, and used for example inputs.
        spec: recorded in ``source``, so that a verifier can build the module again.

    Raises:
        ExportError: when the module cannot be exported faithfully; one line that names the module, the reason and the way out.
    """
    if not isinstance(module, nn.Module):
        raise ExportError(
            f"{spec or type(module).__name__}", f"it is a {type(module).__name__}, not an nn.Module", "give a model or a factory of one"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ExportError(
            f"{spec or type(module).__name__}", "a TorchScript module has no Python source to trace", "give the nn.Module that it was made from"
        )
    _refuse_dtypes(module)
    chosen = Loss.of(loss)
    specs = _input_specs(module, inputs)
    own_loss = chosen is None or chosen.name == "output"
    feeds = (*specs, *labels) if own_loss else specs
    rng = np.random.default_rng(seed)
    example = [torch.from_numpy(np.asarray(s.sample(rng))) for s in feeds]
    traced = trace_module(module, [s.name for s in feeds], example)
    facts = program_facts(traced)
    rewrite_dropouts(traced.program)
    resolve_strides(traced.program)
    float_bounds(traced.program)
    expand_copies(traced.program)
    contiguous_views(traced.program)
    program = _to_onnx(module, traced)
    graph = _with_roles(module, traced, program, specs, tuple(labels) if own_loss else ())
    graph.source = {
        "kind": "torch",
        "spec": spec,
        "seed": seed,
        "model": f"{type(module).__module__}.{type(module).__qualname__}",
        "inputs": [str(s) for s in specs],
        "versions": library_versions(),
        **graph.source,
    }
    append_loss(graph, chosen, labels)
    infer_shapes(graph.model)
    folded = [n for n in sorted(facts.parameters) if n in graph.source["folded_parameters"] and n not in graph.model.graph.initializers]
    if folded:  # constants decided that they are not read, such as a mask that the model makes up
        idle = without_effect(module, [s.name for s in feeds], example, folded)
        facts = replace(facts, parameters=facts.parameters - idle)
    audit(facts, graph)
    return graph


def _refuse_dtypes(module: nn.Module) -> None:
    """ONNX Runtime's kernels that accumulate gradients and update in place know float32 alone; of a lazy module nothing is known yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ExportError(f"parameter {name}", "it has no shape yet, its module is lazy", "run the model once, on inputs of the right shapes")
    for name, parameter in module.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.dtype.is_complex:
            raise ExportError(f"parameter {name}", f"{dtype} tensors have no gradient here", "use pairs of real tensors")
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            why = f"{dtype} has no training kernels here (the first: {owner})"
            raise ExportError(f"parameter {name}", why, "train in float32: call float() on the model")


def _input_specs(module: nn.Module, inputs: Sequence[InputSpec | Any]) -> tuple[InputSpec, ...]:
    """Specs as given; arrays become specs under the names of forward's parameters, integers drawn below their maximum + 1."""
    import inspect

    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    specs = []
    for i, item in enumerate(inputs):
        if isinstance(item, InputSpec):
            specs.append(item)
            continue
        array = item.detach().cpu().numpy() if isinstance(item, torch.Tensor) else np.asarray(item)
        name = names[i] if i < len(names) else f"input_{i}"
        high = int(array.max()) + 1 if np.issubdtype(array.dtype, np.integer) and array.size and array.min() >= 0 else None
        try:
            specs.append(InputSpec(name, array.shape, array.dtype.name, high))
        except ValueError as error:
            raise ExportError(f"example input {i}", str(error), "give float, integer or bool arrays") from error
    if not specs:
        raise ExportError(type(module).__name__, "no inputs given", "name at least one, such as x=8x3x224x224")
    seen: set[str] = set()
    for s in specs:
        if s.name in seen:
            raise ExportError(f"input {s.name}", "named twice", "give every input a name of its own")
        seen.add(s.name)
    return tuple(specs)


def _to_onnx(module: nn.Module, traced: TracedModule) -> torch.onnx.ONNXProgram:
    try:
        with quiet():
            program = torch.onnx.export(
                traced.program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                custom_translation_table=translation_table(),
            )
    except Exception as error:  # the exporter wraps whatever a translation raises
        raise _conversion_error(module, traced, error) from error
    if program is None:
        raise ExportError(type(module).__name__, "torch.onnx.export returned nothing", "report the model that led here")
    return program


def _conversion_error(module: nn.Module, traced: TracedModule, error: BaseException) -> ExportError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    refusal = next((c for c in chain if isinstance(c, ExportError)), None)
    text = " ".join(str(c) for c in chain)
    node = next((n for n in traced.program.graph.nodes if f"%{n.name} :" in text), None)
    where = f"{type(module).__name__}"
    if node is not None:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        where = f"module {stack[-1][0] or where}" if stack else where
        where += user_line(node.meta.get("stack_trace") or "")
    if refusal is not None:
        return ExportError(f"{refusal.what} in {where}", refusal.why, refusal.way_out)
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", text)
    if missing is not None:
        name = missing.group(1)
        # A decomposition may have renamed it: linalg_svd became _linalg_svd, lgamma became prims.lgamma.
        stem = re.sub(r"^_|_ex$|_forward$", "", name.rpartition(".")[2])
        called = (n for n in traced.program.graph.nodes if n.op == "call_function")
        source = next((n for n in called if stem.replace("_", "") in str(n.target).replace("_", "")), None)
        if node is None and source is not None:
            where += user_line(source.meta.get("stack_trace") or "")
        return ExportError(where, f"{name} has no ONNX form", "replace it by operations that ONNX opset 20 has, or compute it before the model")
    deepest = str(chain[-1]).strip().splitlines() or [type(chain[-1]).__name__]
    return ExportError(where, f"no ONNX form: {deepest[0]}", "replace the operation by ones that ONNX opset 20 has")


def _with_roles(
    module: nn.Module,
    traced: TracedModule,
    program: torch.onnx.ONNXProgram,
    inputs: tuple[InputSpec, ...],
    labels: tuple[InputSpec, ...],
) -> ForwardGraph:
    model: ir.Model = program.model
    signature = program.exported_program.graph_signature
    refuse_written_parameters(module, program.exported_program)
    outputs = list(model.graph.outputs)
    own, buffer_values = outputs[: len(traced.output_names)], outputs[len(traced.output_names) :]
    if len(buffer_values) != len(traced.buffer_names):
        raise ExportError(type(module).__name__, "its outputs and the exported ones differ in number", "report the model that led here")
    tied = _merge_tied(module, model)
    mutated = set(signature.buffers_to_mutate.values())
    state = {name: value for name, value in zip(traced.buffer_names, buffer_values, strict=True) if name in mutated}
    for name in state:
        dtype = module.get_buffer(name).dtype
        if dtype.is_floating_point and dtype is not torch.float32:
            why = f"{str(dtype).removeprefix('torch.')} has no kernel that updates it in place"
            raise ExportError(f"buffer {name}", why, "keep it in float32: call float() on the model")
    model.graph.outputs.clear()
    model.graph.outputs.extend((*own, *state.values()))
    _snapshot(model)
    model.ir_version = IR_VERSION
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    tables = {n for n, b in buffers.items() if n not in state and not b.dtype.is_floating_point}
    rows = {(*inputs, *labels)[i]: rows for i, rows in looked_up_inputs(model).items()}
    for spec, count in rows.items():
        if spec.high is not None and spec.high > count:
            why = f"they are drawn from [0, {spec.high}), and the model looks them up in a table of {count} rows"
            raise ExportError(f"input {spec.name}", why, f"write {replace(spec, high=count)}")
    mark_padding_rows(model)
    mark_checkpoints(model)
    shield_detaches(model)
    exported = {n for n, value in model.graph.initializers.items() if n in parameters and value.uses()}
    clean(model, (set(parameters) | set(buffers)) - tables)
    unshield_detaches(model)
    used = {name for name, value in model.graph.initializers.items() if value.uses() or value.is_graph_output()}
    trainable = tuple(n for n, p in parameters.items() if p.requires_grad and n in used)
    remove_idle_detaches(model, set(trainable))
    out_names, state_names = final_names(traced.output_names, list(state), [s.name for s in (*inputs, *labels)], model)
    rename_values(model, [s.name for s in (*inputs, *labels)], [*out_names, *state_names])
    for name in [n for n, value in model.graph.initializers.items() if not value.uses() and not value.is_graph_output()]:
        del model.graph.initializers[name]
    for name in [n for n in state if n not in model.graph.initializers]:
        # The step overwrites it without reading it: its next value needs a place all the same.
        tensor = ir.tensor(buffers[name].detach().cpu().numpy().copy(), name=name)
        shape = ir.Shape(tensor.shape.numpy())
        model.graph.register_initializer(ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor))
    frozen = [n for n, p in parameters.items() if not p.requires_grad] + [n for n in buffers if n not in state]
    return ForwardGraph(
        model=model,
        inputs=inputs,
        labels=labels,
        trainable=trainable,
        frozen=tuple(n for n in frozen if n in model.graph.initializers),
        state=dict(zip(state, state_names, strict=True)),
        outputs=tuple(out_names),
        stop_gradient=frozenset(str(n.outputs[0].name) for n in model.graph if STOP_GRADIENT in n.metadata_props),
        tied=tied,
        source={
            "unused": sorted(n for n in parameters if n not in model.graph.initializers),
            "folded_parameters": sorted(n for n in exported if n not in model.graph.initializers),
            "folded_buffers": sorted(n for n in tables if n not in model.graph.initializers),
            "table_rows": {spec.name: count for spec, count in rows.items()},
        },
    )


def _merge_tied(module: nn.Module, model: ir.Model) -> dict[str, str]:
    """One initializer per torch tensor, under its first name in module order; returns further name -> first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            tied[name] = canonical
    initializers = model.graph.initializers
    for name, canonical in tied.items():
        extra = initializers.pop(name, None)
        if extra is None:
            continue
        if canonical in initializers:
            ir.convenience.replace_all_uses_with(extra, initializers[canonical], replace_graph_outputs=True)
        else:
            extra.name = canonical
            initializers[canonical] = extra
    return tied


def _snapshot(model: ir.Model) -> None:
    """Copies the weights: the module may be trained, or freed, after its export."""
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            value.const_value = ir.Tensor(np.array(value.const_value.numpy(), copy=True), dtype=value.const_value.dtype, name=name)
