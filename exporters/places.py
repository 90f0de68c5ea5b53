"""Where in the user's code a node comes from: the module path and the line that the exporter of torch recorded."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["place_of", "scope_of", "user_line"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+\n?[ \t]*([^\n]*)')
#: Paths of torch's own files, wherever the exporter ran.
_TORCH = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]")
#: This folder, whose stand-ins for functions of torch are no code of the user.
_HERE = str(PurePath(__file__).parent)


def user_line(stack: str) -> str:
    """`` at FILE:LINE (code)`` of the innermost frame outside torch and this folder, or an empty string."""
    for file, line, code in reversed(_FRAME.findall(stack)):
        if not _TORCH.search(file) and not file.startswith(("<", _HERE)):
            return f" at {PurePath(file).name}:{line}" + (f" ({code.strip()})" if code.strip() else "")
    return ""


def scope_of(node: ir.Node) -> str:
    """The path of the module that a node came from; empty for the model itself, and where none was recorded."""
    text = node.metadata_props.get(_SCOPES, "")
    scopes = ast.literal_eval(text) if text else []
    return str(scopes[-2]) if len(scopes) > 1 else ""  # the last is the operation


def place_of(node: ir.Node) -> str:
    """`` of module 'PATH' at FILE:LINE (code)``, as far as recorded."""
    scope = scope_of(node)
    return (f" of module '{scope}'" if scope else "") + user_line(node.metadata_props.get(_STACK, ""))
