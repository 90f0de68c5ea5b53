"""The Python API: what the command line does, as functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .artifact import Artifact
from .costs.transfer import Swap
from .errors import UsageError
from .exporters import ExportError, InputSpec, Loss
from .optimizers import Optimizer
from .pipeline import Request, compile_module, compile_source, target_of
from .runtime.cuda import Cuda
from .spill import spilling_to
from .targets import PROVIDERS
from .units import Budget
from .verification import Verification, verify_artifact

__all__ = ["compile", "verify"]


def compile(
    model: Any,
    output: str | os.PathLike[str],
    *,
    inputs: Sequence[InputSpec | str] = (),
    labels: Sequence[InputSpec | str] = (),
    loss: Loss | str | None = None,
    optimizer: Optimizer | str = "adamw",
    budget: Budget | str | int | None = None,
    activation_budget: str | None = None,
    strategy: str = "auto",
    time_limit: float = 60.0,
    work_limit: int | None = None,
    seed: int = 0,
    threads: int = 0,
    costs: str = "measured",
    target: str = "ort-training",
    conv_layout: str = "auto",
    freeze: Sequence[str] = (),
    train_mode: bool = False,
    verify: bool = True,
    swap: str = "none",
    swap_bandwidth: str | None = None,
    swap_bytes: str | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    provider: str = "cpu",
    provider_options: Sequence[str] = (),
    allow_cpu_nodes: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> Artifact:
    """Compile a model into a training artifact.

    Args:
        model: a ``torch.nn.Module``, or a source: ``package.module:factory``, ``zoo:NAME``, or the path of a ``.onnx`` file.
        output: the artifact's folder; it appears whole or not at all.
        inputs: the batch, such as ``"x=8x3x224x224"`` or ``"ids=2x128:int64:30522"``.
        labels: the labels; left out, as the loss needs them.
        loss: such as ``"cross_entropy"``; None for the model's own scalar output.
        optimizer: ``"adamw"``, ``"sgd"`` or an Optimizer.
        budget: bytes, ``"512MiB"``, ``"60%"`` of the unscheduled step's peak, or ``"min"`` for the smallest that is found; left out, the
            step is not reduced.
        activation_budget: instead, a share such as ``"50%"`` of what is not resident anyway.
        strategy: scheduling strategy.
        time_limit: seconds that planning may take.
        work_limit: moves of local search that it may take; None for as many as are worth it.
        seed: of the factory's weights, the example batch and the planner.
        threads: intra-op threads of the training; 0 is ONNX Runtime's default.
        costs: ``"measured"`` on this machine, or ``"analytic"``.
        conv_layout: ``"nchwc"`` for convolutions in the blocked layout (faster, x86-64 only), ``"nchw"`` for a file that loads on every
            processor, ``"auto"`` for what suits this machine.
        target: ``"ort-training"`` for onnxruntime-training, ``"onnxruntime"`` for any ONNX Runtime: standard operators only.
        freeze: patterns of parameters that are not trained, such as ``"backbone.*"``.
        train_mode: of a ``.onnx`` file: turn inference BatchNormalization and Dropout into their training forms.
        verify: compare the numbers with the unscheduled step's and torch's, and the measured peak with the budget.
        swap: ``"disk"`` to let the planner swap tensors to a file where that is faster than recomputing them, on CUDA ``"host"`` for the
            memory of the host; ``"none"``.
        swap_bandwidth: of that file or of the GPU's copies, such as ``"2GiB/s"``, or ``"1GiB/s:3GiB/s"`` for out and in; left out, it is measured.
        swap_bytes: the most that may be swapped out at one time, such as ``"20GiB"``.
        spill_dir: the folder of that file; left out, that of the environment (``ONNXREMAT_SPILL_DIR``, ``TMPDIR``, ``/var/tmp``). Where the
            step runs later is said there.
        provider: ``"cpu"``, or ``"cuda"`` for a step that is trained on a GPU.
        provider_options: further options of ONNX Runtime's CUDA provider, ``"KEY=VALUE"``.
        allow_cpu_nodes: also compile where nodes have no CUDA kernel and run on the CPU.
        progress: told what happens.

    Returns:
        The artifact.

    Raises:
        BudgetInfeasible: no plan fits; ``minimum_budget_bytes`` says which budget would do.
        OnnxRematError: anything else, in one line.
    """
    request = make_request(
        model if isinstance(model, str) else type(model).__name__,
        inputs=inputs,
        labels=labels,
        loss=loss,
        optimizer=optimizer,
        budget=parse_budget(budget, activation_budget),
        strategy=strategy,
        time_limit=time_limit,
        work_limit=work_limit,
        seed=seed,
        threads=threads,
        costs=costs,
        conv_layout=conv_layout,
        target=target,
        freeze=tuple(freeze),
        train_mode=train_mode,
        verify=verify,
        swap=swap,
        swap_bandwidth=swap_bandwidth,
        swap_bytes=swap_bytes,
        spill_dir=spill_dir,
        provider=provider,
        provider_options=provider_options,
        allow_cpu_nodes=allow_cpu_nodes,
    )
    with spilling_to(request.swap.directory):
        if isinstance(model, str):
            return compile_source(request, Path(output), progress)
        return compile_module(model, request, Path(output), progress)


def verify(
    artifact: Artifact | str | os.PathLike[str],
    *,
    steps: int = 3,
    threads: int = 0,
    seed: int = 0,
    measure: bool = True,
    provider: str | None = None,
) -> Verification:
    """Check the numbers and the peak of an artifact; see ``onnxremat.verification``."""
    found = artifact if isinstance(artifact, Artifact) else Artifact.load(Path(artifact))
    return verify_artifact(found, steps=steps, threads=threads, seed=seed, measure=measure, provider=provider)


def make_request(
    source: str,
    *,
    inputs: Sequence[InputSpec | str] = (),
    labels: Sequence[InputSpec | str] = (),
    loss: Loss | str | None = None,
    optimizer: Optimizer | str = "adamw",
    strategy: str = "auto",
    swap: str = "none",
    swap_bandwidth: str | None = None,
    swap_bytes: str | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    provider: str = "cpu",
    provider_options: Sequence[str] = (),
    allow_cpu_nodes: bool = False,
    **fields: Any,
) -> Request:
    """A request from arguments of :func:`compile`, ``fields`` as they are; raises UsageError where they make no sense, or not together."""
    cuda = parse_cuda(provider, provider_options, allow_cpu_nodes)
    request = Request(
        source=source,
        inputs=parse_specs(inputs),
        labels=parse_specs(labels),
        loss=parse_loss(loss),
        optimizer=optimizer if isinstance(optimizer, Optimizer) else Optimizer(optimizer),
        strategy=known_strategy(strategy),
        swap=Swap.parse(swap, swap_bandwidth, swap_bytes, None if spill_dir is None else os.fspath(spill_dir), cuda),
        cuda=cuda,
        **fields,
    )
    target_of(request)
    return request


def parse_cuda(provider: str, options: Sequence[str] = (), allow_cpu_nodes: bool = False) -> Cuda | None:
    """The GPU that options name; None for the CPU. Raises UsageError."""
    if provider not in PROVIDERS:
        raise UsageError(f"there is no provider '{provider}': choose {' or '.join(PROVIDERS)}")
    if provider == "cuda":
        return Cuda.parse(options, allow_cpu_nodes)
    if options or allow_cpu_nodes:
        raise UsageError("--provider-option and --allow-cpu-nodes are CUDA's: give --provider cuda as well")
    return None


def parse_specs(specs: Sequence[InputSpec | str]) -> tuple[InputSpec, ...]:
    """Input specs from objects or text; raises UsageError."""
    try:
        return tuple(s if isinstance(s, InputSpec) else InputSpec.parse(s) for s in specs)
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse_budget(budget: Budget | str | int | None, activation_budget: str | None) -> Budget:
    """The budget that two options name; raises UsageError where both do."""
    if budget is not None and activation_budget is not None:
        raise UsageError("give --budget or --activation-budget, not both")
    if activation_budget is not None:
        return Budget.parse(activation_budget, activations_only=True)
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, int):
        if budget <= 0:
            raise UsageError(f"a budget of {budget} bytes leaves no memory")
        return Budget(budget)
    return Budget.parse(budget) if budget is not None else Budget(1.0, relative=True)


def parse_loss(loss: Loss | str | None) -> Loss | None:
    """A loss from an object or text; raises UsageError where there is none of that name or with that option."""
    try:
        return Loss.of(loss)
    except ExportError as error:
        raise UsageError(str(error)) from error


def known_strategy(name: str) -> str:
    """The name of a strategy; raises UsageError where there is none such."""
    from .scheduler import strategies

    if name not in strategies():
        raise UsageError(f"there is no strategy '{name}': choose {', '.join(strategies())}")
    return name
