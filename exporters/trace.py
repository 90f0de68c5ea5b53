"""nn.Module -> ExportedProgram, with what torch.export would drop or refuse put right beforehand."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import nn

from .autograd_functions import UnprovenFunction, custom_functions_as, forward_of, proven_functions
from .checkpoints import whole_checkpoints
from .errors import ExportError
from .functional import stand_ins
from .masked_selections import resolve_selections
from .module_copy import copy_module
from .module_state import left_as_it_was, new_buffers
from .no_grad import inline_grad_regions
from .places import user_line
from .quiet import quiet
from .selections import WAY_OUT

__all__ = ["TracedModule", "bind_inputs", "refuse_written_parameters", "trace_module", "without_effect"]

_TORCH = str(Path(torch.__file__).parent)


@dataclass
class TracedModule:
    """An exported program (training IR, no_grad regions inlined as detach) and the names of its flat outputs.

    After the model's own outputs come the values of all buffers at the end of the step: torch.onnx forgets mutations, never outputs.
    """

    program: torch.export.ExportedProgram
    output_names: tuple[str, ...]
    buffer_names: tuple[str, ...]


def bind_inputs(module: nn.Module, names: Sequence[str]) -> list[str] | None:
    """How named inputs reach ``module.forward``: by keyword (the keywords) when each is a parameter of it, or it takes any keyword and misses
    no other, else by position (None).

    Raises:
        ExportError: when ``forward`` takes fewer positional inputs, or needs more, than there are names.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    signature = f"forward({', '.join(p.name for p in parameters)})"
    by_name = any(p.kind is p.VAR_KEYWORD for p in parameters) and all(name in names for name in required)
    if by_name or all(name in keyword for name in names):
        missing = [name for name in required if name not in names]
        if missing:
            raise ExportError(f"{type(module).__name__}.{signature}", f"no input given for {', '.join(missing)}", "name every input of forward")
        return list(names)
    if len(names) < len(required) or (len(names) > len(positional) and not takes_any):
        raise ExportError(
            f"{type(module).__name__}.{signature}",
            f"{len(names)} inputs given ({', '.join(names)}), which it cannot take by position",
            "give its inputs in order, or under its parameter names",
        )
    return None


def trace_module(module: nn.Module, names: Sequence[str], example: Sequence[torch.Tensor]) -> TracedModule:
    """Exports ``module``, each submodule in its own train/eval mode, for the shapes of the example inputs.

    Raises:
        ExportError: when the module cannot be traced, naming the user's line where there is one.
    """
    _refuse_hooks(module)
    try:
        return _trace(module, names, example, frozenset())
    except UnprovenFunction:
        keywords = bind_inputs(module, names)

        def run(clone: nn.Module) -> None:
            _ = clone(*example) if keywords is None else clone(**dict(zip(keywords, example, strict=True)))

        try:
            proven = proven_functions(module, run)
        except ExportError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise _untraceable(module, error, lambda: _runs(module, keywords, example)) from error
        return _trace(module, names, example, proven)


def _trace(module: nn.Module, names: Sequence[str], example: Sequence[torch.Tensor], proven: frozenset[type]) -> TracedModule:
    """Traces custom autograd Functions through their forward where they are among ``proven``; raises UnprovenFunction for another one."""
    keywords = bind_inputs(module, names)
    unproven: list[type] = []

    def custom(function: type, *args: Any, **kwargs: Any) -> Any:
        if function in proven:
            return forward_of(function, *args, **kwargs)
        unproven.append(function)
        raise UnprovenFunction(function.__qualname__)

    failure: Exception | None = None
    recorded: list[str] = []
    buffers = tuple(name for name, _ in module.named_buffers())
    original = module.forward

    def flat_forward(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = original(*args) if keywords is None else original(**dict(zip(keywords, args, strict=True)))
        flat: list[tuple[str, torch.Tensor]] = []
        _flatten(result, "", flat)
        if not flat:
            raise ExportError(f"{type(module).__name__}.forward", "it returns no tensor", "return the tensors that the loss needs")
        recorded[:] = [name for name, _ in flat]
        values = [module.get_buffer(name).clone() for name in buffers]
        take_off()
        return (*(tensor for _, tensor in flat), *values)

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(left_as_it_was(module))
        take_off = stack.enter_context(new_buffers(module))
        stack.enter_context(_override(module, "forward", flat_forward))
        for sub in module.modules():
            if isinstance(sub, nn.modules.batchnorm._BatchNorm) and sub.momentum is None and sub.training and sub.track_running_stats:
                stack.enter_context(_override(sub, "forward", _cumulative_forward(sub)))
        for target, name, function in stand_ins():
            stack.enter_context(_override(target, name, function))
        stack.enter_context(custom_functions_as(custom))
        stack.enter_context(whole_checkpoints())
        stack.enter_context(fx_traceback.preserve_node_meta())
        try:
            with quiet():
                program = torch.export.export(module, tuple(example), strict=False)
        except ExportError as error:
            raise error.at(_raised_at(error)) from error
        except Exception as error:  # torch.export raises whatever the user's code raises
            if unproven:
                raise UnprovenFunction(unproven[0].__qualname__) from error
            failure = error
    if failure is not None:  # told here, where the module is its own again
        raise _untraceable(module, failure, lambda: _runs(module, keywords, example)) from failure
    inline_grad_regions(program)
    resolve_selections(program)
    _check_values(module, program)
    return TracedModule(program, tuple(recorded), buffers)


def _flatten(value: Any, path: str, flat: list[tuple[str, torch.Tensor]]) -> None:
    """Lists tensors in ``value`` under names made of keys, fields and positions; None is left out as torch's own outputs do."""
    if isinstance(value, torch.Tensor):
        flat.append((path or "output", value))
        return
    if value is None:
        return
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise ExportError(f"output {path or '0'} of the model", "a Python value computed from data", "keep it a tensor (no .item(), no .tolist())")
    items: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = list(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        items = [(f"output_{i}" if not path else str(i), item) for i, item in enumerate(value)]
    else:
        raise ExportError(
            f"output {path or '0'} of the model",
            f"it is a {type(value).__name__}, not a tensor",
            "return tensors (transformers: use_cache=False)",
        )
    for key, item in items:
        clean = re.sub(r"[^0-9A-Za-z_.]", "_", key)
        _flatten(item, f"{path}_{clean}" if path else clean, flat)


def _cumulative_forward(bn: nn.modules.batchnorm._BatchNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    """BatchNorm with momentum=None in traceable form: its factor 1/num_batches_tracked is a tensor, never a Python float."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        bn._check_input_dim(x)
        counter, mean, var = bn.num_batches_tracked, bn.running_mean, bn.running_var
        if counter is None or mean is None or var is None:
            raise ExportError("BatchNorm", "momentum=None without running statistics", "set track_running_stats=False")
        counter.add_(1)
        batch_mean, batch_var = torch.zeros_like(mean), torch.zeros_like(var)
        y = F.batch_norm(x, batch_mean, batch_var, bn.weight, bn.bias, True, 1.0, bn.eps)
        share = 1.0 / counter.to(mean.dtype)
        mean.copy_(mean * (1.0 - share) + batch_mean * share)
        var.copy_(var * (1.0 - share) + batch_var * share)
        return y

    return forward


@contextlib.contextmanager
def _override(target: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an instance attribute for the time of the trace; whatever the instance had comes back."""
    had = name in vars(target)
    before = vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, before)
        else:
            delattr(target, name)


def _refuse_hooks(module: nn.Module) -> None:
    for name, sub in module.named_modules():
        if sub._backward_hooks or sub._backward_pre_hooks:
            raise ExportError(f"module {name or type(module).__name__}", "backward hooks change gradients unseen", "remove them before exporting")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            raise ExportError(f"parameter {name}", "a gradient hook changes its gradient unseen", "remove it before exporting")


def _check_values(module: nn.Module, program: torch.export.ExportedProgram) -> None:
    """Refuses shapes that depend on data and dtypes without an ONNX training meaning."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, list | tuple) else (value,):
            line = user_line(node.meta.get("stack_trace") or "")
            if isinstance(tensor, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise ExportError(f"{node.target}{line}", "a Python value computed from data", "keep it a tensor (no .item(), no bool())")
            if not isinstance(tensor, torch.Tensor):
                continue
            if not all(isinstance(d, int) for d in tensor.shape):
                way_out = "give output_size" if "repeat_interleave" in str(node.target) else WAY_OUT
                raise ExportError(f"{node.target}{line}", f"its output shape {tuple(tensor.shape)} depends on data", way_out)
            if tensor.dtype.is_complex:
                raise ExportError(f"{node.target}{line}", "complex tensors have no gradient here", "use pairs of real tensors")
    refuse_written_parameters(module, program)


def refuse_written_parameters(module: nn.Module, program: torch.export.ExportedProgram) -> None:
    """Raises ExportError where a parameter is written to; what is written by way of ``detach`` is known once the program is functional."""
    written = sorted(program.graph_signature.parameters_to_mutate.values())
    if written:
        raise ExportError(f"parameter {written[0]}", f"{type(module).__name__}.forward writes to it", "make it a buffer, or update it outside")


def _raised_at(error: BaseException) -> str:
    """`` at FILE:LINE (code)`` of the innermost frame of the user's code that an exception passed, or an empty string."""
    here = str(Path(__file__).resolve().parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH, "<"))]
    frames = [f for f in frames if not str(Path(f.filename).resolve()).startswith(here)]
    frames = [f for f in frames if f.filename.endswith(".py")]
    if not frames:
        return ""
    own = [f for f in frames if "site-packages" not in f.filename]
    inner = frames[-1]
    called = f", called at {Path(own[-1].filename).name}:{own[-1].lineno}" if own and own[-1] is not inner else ""
    return f" at {Path(inner.filename).name}:{inner.lineno} ({inner.line}){called}"


def without_effect(module: nn.Module, names: Sequence[str], example: Sequence[torch.Tensor], parameters: Sequence[str]) -> set[str]:
    """Those of the parameters whose gradients are zero in torch, whatever the cotangents: the outputs for these inputs ignore them."""
    keywords = bind_inputs(module, names)
    flat: list[tuple[str, torch.Tensor]] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        clone = copy_module(module)
        _flatten(clone(*example) if keywords is None else clone(**dict(zip(keywords, example, strict=True))), "", flat)
        total = sum((tensor * torch.randn_like(tensor)).sum() for _, tensor in flat if tensor.requires_grad)
    if not isinstance(total, torch.Tensor):
        return set(parameters)
    grads = torch.autograd.grad(total, [clone.get_parameter(name) for name in parameters], allow_unused=True)
    return {name for name, grad in zip(parameters, grads, strict=True) if grad is None or not bool(grad.any())}


def _runs(module: nn.Module, keywords: Sequence[str] | None, example: Sequence[torch.Tensor]) -> bool:
    """Whether torch itself runs a copy of the module with these inputs."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            clone = copy_module(module)
            _ = clone(*example) if keywords is None else clone(**dict(zip(keywords, example, strict=True)))
    except Exception:  # whatever the user's code raises
        return False
    return True


def _untraceable(module: nn.Module, error: Exception, runs: Callable[[], bool]) -> ExportError:
    cause: BaseException | None = error
    while cause is not None:  # the user's refusal may have been wrapped on its way out
        if isinstance(cause, ExportError):
            return cause.at(_raised_at(cause))
        cause = cause.__cause__ or cause.__context__
    at = _raised_at(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    kind = type(error).__name__
    derived = any(Path(f.filename).name == "eager_transforms.py" for f in traceback.extract_tb(error.__traceback__))
    if derived or "fake tensor in the exported program" in str(error):
        why = "cannot be traced: it makes a tensor that torch.export loses sight of, as torch.autograd.grad and torch.func.grad may"
        return ExportError(f"{type(module).__name__}{at}", why, "write that derivative in operations of torch")
    data_dependent = "DataDependent" in kind or "data-dependent" in str(error) or "Unsupported" in kind
    if data_dependent:
        way_out = "replace Python control flow on tensor values by torch.where or masks"
    elif runs():
        way_out = "torch runs it, and torch.export does not: give forward the inputs that it makes up otherwise (a mask), or simplify that line"
    else:
        way_out = "run the module once in torch with inputs of these shapes and dtypes"
    return ExportError(f"{type(module).__name__}{at}", f"cannot be traced: {kind}: {first}", way_out)
