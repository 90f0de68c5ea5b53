"""A forward .onnx file of any exporter -> ForwardGraph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from .cleanup import clean, infer_shapes
from .control_flow import unroll_control_flow
from .errors import ExportError
from .forward_graph import IR_VERSION, OPSET, ForwardGraph, InputSpec, has_roles, read_model
from .group_norm import write_out_group_normalizations
from .losses import Loss, append_loss
from .places import place_of
from .roles import rename_values, unique_name
from .train_mode import turn_to_training
from .unfuse import unfuse
from .versions import library_versions
from .weights import lift_weights, separate_statistics_from_weights, weight_like_initializers

__all__ = ["import_onnx"]

_DOMAINS = ("", "ai.onnx", "com.microsoft")
_LARGE_BYTES = 1 << 16
"""Weights beyond this many bytes are kept out of the opset conversion: it needs none of their values, and a message ends at 2 GiB."""
_COMPLEX = {ir.DataType.COMPLEX64, ir.DataType.COMPLEX128}
_UNFED = {ir.DataType.STRING, *_COMPLEX}


def import_onnx(
    path: str | Path,
    inputs: Sequence[InputSpec] = (),
    labels: Sequence[InputSpec] = (),
    loss: Loss | str | None = None,
    trainable: Sequence[str] | None = None,
    seed: int = 0,
    train_mode: bool = False,
) -> ForwardGraph:
    """Imports a forward graph; a file that ``ForwardGraph.save`` wrote is loaded as it is when nothing else is asked for.

    Args:
        path: the .onnx file.
        inputs: pin dynamic dimensions, by name; empty takes the file's own where they are static.
        labels: with a loss by name, its label; with the model's own scalar output, those inputs of the file that are labels.
        loss: see :func:`append_loss`.
        trainable: initializers to train; default: every float one that stands where weights stand (convolution and matrix operands,
            biases, normalisation scales, embeddings), directly or behind Transpose, Reshape, Cast and the like.
        seed: recorded in ``source``.
        train_mode: turn inference BatchNormalization and Dropout into their training forms; without it a file is taken at its word.

    Raises:
        ExportError: for a missing or foreign file, inputs that do not match, an opset that cannot be converted, or dynamic shapes.
    """
    model = read_model(path)
    chosen = Loss.of(loss)
    if has_roles(model):
        graph = ForwardGraph.load(path)
        if chosen is None or chosen.name == "output":
            return _again(graph, path, inputs, labels, trainable)
        if graph.loss is not None:
            raise ExportError(str(path), f"the file has a loss already ({graph.loss})", "leave --loss out, or export it without a loss")
        append_loss(graph, chosen, labels)
        infer_shapes(graph.model)
        return graph
    _inline_functions(model, path)
    _check_operators(model, path)
    model = _convert(model, path)
    passes.RemoveInitializersFromInputsPass()(model)
    unfuse(model)
    separate_statistics_from_weights(model)
    lift_weights(model)
    if train_mode:
        turn_to_training(model)
    own_loss = chosen is None or chosen.name == "output"
    feeds = _pin(model, path, [*inputs, *(labels if own_loss else ())])
    label_names = {spec.name for spec in labels} if own_loss else set()
    _name_everything(model)
    unroll_control_flow(model)
    initializers = set(model.graph.initializers)
    trained = _trainable(model, path, trainable)
    _refuse_dtypes(model, trained)
    state = _batch_norm_state(model)
    ends = [str(v.name) for v in model.graph.inputs], [str(v.name) for v in model.graph.outputs]
    clean(model, {*trained, *state} | {n for n in initializers if _is_float(model.graph.initializers[n])})
    rename_values(model, *ends)  # a no-op before an output may have gone, and the output's name with it
    for name in [n for n, v in model.graph.initializers.items() if not v.uses() and not v.is_graph_output()]:
        del model.graph.initializers[name]
    outputs = tuple(str(v.name) for v in model.graph.outputs if v.name not in state.values())
    model.ir_version = IR_VERSION
    graph = ForwardGraph(
        model=model,
        inputs=tuple(s for s in feeds if s.name not in label_names),
        labels=tuple(s for s in feeds if s.name in label_names),
        trainable=tuple(n for n in trained if n in model.graph.initializers),
        frozen=_frozen(model, initializers - set(trained) - set(state)),
        state=state,
        outputs=outputs,
        source={
            "kind": "onnx",
            "spec": str(path),
            "seed": seed,
            "inputs": [str(s) for s in feeds if s.name not in label_names],
            "versions": library_versions(),
        },
    )
    infer_shapes(model)
    append_loss(graph, chosen, labels)
    infer_shapes(model)
    return graph


def _again(
    graph: ForwardGraph, path: str | Path, inputs: Sequence[InputSpec], labels: Sequence[InputSpec], trainable: Sequence[str] | None
) -> ForwardGraph:
    """A file of our own: its shapes are fixed, so whatever is asked for must agree with them."""
    own = {spec.name: spec for spec in (*graph.inputs, *graph.labels)}
    for spec in (*inputs, *labels):
        has = own.get(spec.name)
        if has is None or (has.shape, has.dtype) != (spec.shape, spec.dtype):
            raise ExportError(f"input {spec}", f"{path} was exported with {', '.join(map(str, own.values()))}", "export it again with other shapes")
    if trainable is not None:
        graph.frozen = (*graph.frozen, *(n for n in graph.trainable if n not in trainable))
        graph.trainable = tuple(n for n in graph.trainable if n in trainable)
    return graph


def _inline_functions(model: ir.Model, path: str | Path) -> None:
    """Before all else: no conversion of opsets, and no check of operators, looks into a function."""
    if not model.functions:
        return
    try:
        passes.InlinePass()(model)
    except Exception as error:  # the pass wraps what it raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(str(path), f"its functions cannot be inlined: {cause}", "export it without functions, or with one opset for all") from error
    model.functions.clear()


def _check_operators(model: ir.Model, path: str | Path) -> None:
    for node in model.graph:
        where = f"{node.op_type} {node.name} in {path}{place_of(node)}"
        if node.domain not in _DOMAINS:
            raise ExportError(where, f"operator domain {node.domain} is unknown", "export it with standard operators")
        version = model.opset_imports.get("", model.opset_imports.get("ai.onnx", OPSET))
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, version, ""):
            raise ExportError(where, f"ONNX opset {version} has no such operator", "export it with standard operators")
        made = {value.dtype for value in node.outputs} | {ir.DataType(node.attributes.get_int("to", 0)) if node.op_type == "Cast" else None}
        if made & _COMPLEX:
            raise ExportError(where, "complex tensors have no gradient here", "use pairs of real tensors")


def _convert(model: ir.Model, path: str | Path) -> ir.Model:
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if version is None:
        raise ExportError(str(path), "it imports no ONNX opset", "export it again")
    if version > OPSET + 1:
        raise ExportError(str(path), f"opset {version} is newer than the runtime reads (21)", f"export it with opset {OPSET}")
    write_out_group_normalizations(model, per_channel=version > OPSET)
    if version == OPSET + 1:
        model.opset_imports[""] = OPSET
        return model
    if version == OPSET:
        return model
    weights = {name: v for name, v in model.graph.initializers.items() if v.const_value is not None and v.const_value.nbytes > _LARGE_BYTES}
    held = {name: value.const_value for name, value in weights.items()}
    try:
        for name, tensor in held.items():
            assert tensor is not None
            shape = ir.Shape(tensor.shape.numpy())
            weights[name].const_value = ir.ExternalTensor("elsewhere", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
        proto = onnx.version_converter.convert_version(ir.serde.serialize_model(model), OPSET)
    except Exception as error:  # the converter raises RuntimeError, ConvertError and protobuf errors
        first = str(error).strip().splitlines()[0]
        raise ExportError(str(path), f"opset {version} cannot be converted to {OPSET}: {first}", f"export it with opset {OPSET}") from error
    converted = ir.serde.deserialize_model(proto)
    for name, tensor in held.items():
        converted.graph.initializers[name].const_value = tensor
    return converted


def _pin(model: ir.Model, path: str | Path, wanted: Sequence[InputSpec]) -> tuple[InputSpec, ...]:
    """Makes every graph input static, in the order of the file's inputs."""
    by_name = {spec.name: spec for spec in wanted}
    has = {str(v.name): v for v in model.graph.inputs}
    for spec in wanted:
        if spec.name not in has:
            raise ExportError(f"input {spec.name}", f"{path} has no such input", f"it has {', '.join(has)}")
    feeds = []
    for name, value in has.items():
        if value.dtype is None or value.shape is None or value.dtype in _UNFED:
            raise ExportError(f"input {name} of {path}", f"{value.type} is not a tensor that can be fed", "export it with numeric tensors")
        dtype = value.dtype.numpy().name
        if name not in by_name:
            if not value.shape.is_static():
                raise ExportError(f"input {name} of {path}", f"its shape {value.shape} is dynamic", f"pin it, such as {name}=8x...")
            by_name[name] = InputSpec(name, tuple(int(d) for d in value.shape.numpy()), dtype)
        spec = by_name[name]
        fits = len(spec.shape) == len(value.shape) and all(not isinstance(d, int) or d == s for d, s in zip(value.shape, spec.shape, strict=True))
        if spec.dtype != dtype or not fits:
            raise ExportError(f"input {spec}", f"{path} wants {dtype} {value.shape}", "give it that dtype and shape")
        value.shape = ir.Shape(spec.shape)
        feeds.append(spec)
    # Shapes that the file recorded under its dynamic dimensions would contradict the pinned ones.
    for node in model.graph:
        for out in node.outputs:
            if out.shape is not None and not out.shape.is_static():
                out.shape = None
    return tuple(feeds)


def _name_everything(model: ir.Model) -> None:
    taken: set[str] = set()
    for i, node in enumerate(model.graph):
        node.name = unique_name(str(node.name or f"{node.op_type}_{i}"), taken)
        if node.op_type == "Dropout":
            node.attributes.pop("seed", None)  # two layers of one seed would share their mask


def _is_float(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.dtype.is_floating_point()


def _trainable(model: ir.Model, path: str | Path, wanted: Sequence[str] | None) -> tuple[str, ...]:
    if wanted is None:
        return weight_like_initializers(model)
    for name in wanted:
        value = model.graph.initializers.get(name)
        if value is None or not _is_float(value):
            raise ExportError(f"trainable {name}", f"{path} has no float initializer of that name", "check the name in Netron")
    return tuple(n for n in model.graph.initializers if n in set(wanted))


def _refuse_dtypes(model: ir.Model, trained: Sequence[str]) -> None:
    for name in trained:
        dtype = model.graph.initializers[name].dtype
        if dtype is not None and dtype is not ir.DataType.FLOAT:
            first = next((f" (the first: {u.op_type} {u.name})" for u, _ in model.graph.initializers[name].uses()), "")
            raise ExportError(f"parameter {name}", f"{dtype.name.lower()} has no training kernels here{first}", "convert the file to float32")


def _batch_norm_state(model: ir.Model) -> dict[str, str]:
    """Training-mode BatchNormalization: its running statistics are state, whether or not the file returns them.

    They are updated as ONNX defines it, with the biased variance: a foreign file is taken at its word.
    """
    state: dict[str, str] = {}
    taken = {str(v.name) for n in model.graph for v in n.outputs} | set(model.graph.initializers)
    for node in list(model.graph):
        if node.op_type != "BatchNormalization" or not node.attributes.get_int("training_mode", 0):
            continue
        if len(node.outputs) < 3:
            node.resize_outputs(3)
        for position, output in ((3, node.outputs[1]), (4, node.outputs[2])):
            stat = node.inputs[position]
            if stat is None or stat.name not in model.graph.initializers:
                raise ExportError(f"BatchNormalization {node.name}", "its running statistics are no initializers", "export them as initializers")
            if stat.name in state:
                raise ExportError(f"BatchNormalization {node.name}", f"it shares {stat.name} with another one", "give each its own statistics")
            if not output.name:
                output.name = unique_name(f"{stat.name}.next", taken)
            output.shape, output.type = stat.shape, stat.type
            if not output.is_graph_output():
                model.graph.outputs.append(output)
            state[str(stat.name)] = str(output.name)
    returned = [v for v in model.graph.outputs if v.name in state.values()]
    for value in returned:  # state comes after the model's own outputs
        model.graph.outputs.remove(value)
    model.graph.outputs.extend(returned)
    return state


def _frozen(model: ir.Model, candidates: set[str]) -> tuple[str, ...]:
    """Float initializers that are not trained and not scalars of some formula."""
    kept = (n for n in model.graph.initializers if n in candidates and _is_float(model.graph.initializers[n]))
    return tuple(n for n in kept if np.prod(model.graph.initializers[n].const_value.shape.numpy()) > 1)  # type: ignore[union-attr]
