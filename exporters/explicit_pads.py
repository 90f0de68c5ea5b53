"""``auto_pad`` and ``ceil_mode`` become explicit ``pads``: ORT's ConvGrad ignores auto_pad, silently."""

from __future__ import annotations

import onnx_ir as ir

from .errors import ExportError
from .places import place_of

__all__ = ["make_ceilings_explicit", "make_pads_explicit"]

_PADDED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})


def make_pads_explicit(model: ir.Model) -> None:
    """Rewrites ``auto_pad`` of convolutions and pools from static shapes, in place, and gives every one a ``pads`` attribute.

    Raises:
        ExportError: where shapes are unknown, or a ConvTranspose is asked for an output that its windows do not reach.
    """
    for node in model.graph:
        if node.op_type not in _PADDED or node.domain not in ("", "ai.onnx"):
            continue
        mode = node.attributes.get_string("auto_pad", "NOTSET")
        node.attributes.pop("auto_pad", None)
        if node.op_type == "ConvTranspose" and (mode.startswith("SAME") or "output_shape" in node.attributes):
            _crop_transposed(node, upper=mode == "SAME_UPPER")
            continue
        if mode == "NOTSET" and "pads" in node.attributes:
            continue
        same = mode in ("SAME_UPPER", "SAME_LOWER")
        pads = _same(node, upper=mode == "SAME_UPPER") if same else [0] * (2 * _spatial(node))
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)


def make_ceilings_explicit(model: ir.Model) -> None:
    """``ceil_mode`` of a MaxPool of known shape becomes pads at its end, as far as the last window reaches, in place.

    ONNX's shape inference counts a window that begins in the pads at the end, which torch leaves out; and MaxUnpool wants every window whole.
    """
    for node in model.graph:
        given = node.attributes.get_ints("pads")
        image = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
        if node.op_type != "MaxPool" or not node.attributes.get_int("ceil_mode") or given is None or image is None or not image.is_static():
            continue
        sizes, ones = [int(d) for d in image.numpy()[2:]], [1] * (image.rank() - 2)
        begin, end = given[: len(sizes)], given[len(sizes) :]
        kernel = node.attributes.get_ints("kernel_shape") or ones
        strides = node.attributes.get_ints("strides") or ones
        dilations = node.attributes.get_ints("dilations") or ones
        reach = []
        for size, k, stride, dilation, low, high in zip(sizes, kernel, strides, dilations, begin, end, strict=True):
            window = dilation * (k - 1) + 1
            last = -(-(size + low + high - window) // stride) * stride
            last -= stride if last >= size + low else 0
            reach.append(max(high, last + window - size - low))
        if all(high < k for high, k in zip(reach, kernel, strict=True)):  # the runtime's limit
            node.attributes["pads"] = ir.AttrInt64s("pads", [*begin, *reach])
            node.attributes.pop("ceil_mode", None)


def _shape(node: ir.Node, value: ir.Value | None) -> list[int]:
    if value is None or value.shape is None or not value.shape.is_static():
        raise ExportError(f"{node.op_type} {node.name}{place_of(node)}", "its padding needs static shapes", "give static input shapes")
    return [int(d) for d in value.shape.numpy()]


def _spatial(node: ir.Node) -> int:
    return len(_shape(node, node.inputs[0])) - 2


def _same(node: ir.Node, upper: bool) -> list[int]:
    """SAME: output = ceil(input / stride); the odd cell goes to the end (upper) or the beginning."""
    image = _shape(node, node.inputs[0])[2:]
    kernel = node.attributes.get_ints("kernel_shape") or _shape(node, node.inputs[1])[2:]
    strides = node.attributes.get_ints("strides") or [1] * len(image)
    dilations = node.attributes.get_ints("dilations") or [1] * len(image)
    begin, end = [], []
    for size, k, stride, dilation in zip(image, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + dilation * (k - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if upper else large)
        end.append(large if upper else small)
    return begin + end


def _crop_transposed(node: ir.Node, upper: bool) -> None:
    """The pads that give the output its size, ``output_shape`` or input * stride: the odd cell is cut at the end (upper) or the beginning."""
    image, kernel = _shape(node, node.inputs[0])[2:], _shape(node, node.inputs[1])[2:]
    ones = [1] * len(image)
    strides = list(node.attributes.get_ints("strides") or ones)
    dilations = node.attributes.get_ints("dilations") or ones
    extra = node.attributes.get_ints("output_padding") or [0] * len(image)
    asked = node.attributes.get_ints("output_shape")
    wanted = list(asked or [n * s for n, s in zip(image, strides, strict=True)])[-len(image) :]
    begin, end, beyond = [], [], []
    for size, k, stride, dilation, more, length in zip(image, kernel, strides, dilations, extra, wanted, strict=True):
        spare = (size - 1) * stride + dilation * (k - 1) + 1 + more - length
        cut = max(0, spare)
        begin.append(cut // 2 if upper else cut - cut // 2)
        end.append(cut - begin[-1])
        beyond.append(more + max(0, -spare))
        # Where SAME asks for more than the windows reach, ONNX has a longer output than the runtime; from a stride on its kernel errs.
        if beyond[-1] >= stride or (spare < 0 and not asked):
            where = f"ConvTranspose {node.name}{place_of(node)}"
            raise ExportError(where, f"its output of {length} goes beyond its windows", "give explicit pads, and pad the output with Pad")
    node.attributes.pop("output_shape", None)
    node.attributes["pads"] = ir.AttrInt64s("pads", begin + end)
    node.attributes["output_padding"] = ir.AttrInt64s("output_padding", beyond)
