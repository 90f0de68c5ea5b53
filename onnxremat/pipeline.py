"""The pipeline: export -> normalize -> differentiate -> cost -> plan -> emit -> verify -> artifact."""

from __future__ import annotations

import copy
import importlib.metadata
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from . import artifact as files
from .artifact import Artifact, file_digests, has_large_constants, save_checkpoint, save_model
from .copies import STREAM, cpu_copy
from .costs import analytic_costs, measured_costs
from .costs.analytic import GPU
from .costs.transfer import Swap, swap_channel, swap_note
from .costs.workspace import gpu_workspace, heap_bytes
from .emit import Emitted, emit, is_helper, lay_out, made_names
from .errors import ArtifactError, UsageError, VerificationFailed
from .eval_batch import open_batch
from .eval_graph import eval_model, evaluation_form
from .export_cache import cached_export
from .exporters import ForwardGraph, InputSpec, Loss, build_module, export_torch, load_source
from .exporters.sources import Feeds, source_feeds
from .files import whole_folder, write_json
from .fit import OPTIMIZER_BYTES, Scheduled, Search, fit_arena_alone, lowered, needed, schedule_unscheduled
from .limits import LARGEST_SEED, MOST_THREADS, require_seconds, require_whole
from .nchwc import NCHWC, resolve_layout
from .optimizers import LEARNING_RATE, STEP, Optimizer, optimizer_models
from .problem import Costs, scheduling_problem
from .progress import Interruption, planning_messages
from .runtime.arena import arena_settings, claim_model, claim_shape, needs_claim
from .runtime.cuda import Cuda, available, provider_options, require_cuda
from .runtime.ort import STOCK_PACKAGES, TRAINING_PACKAGES, require_training_package
from .runtime.placement import predicted
from .runtime.session import LEVELS, SESSION_OPTIONS, Options, execution_streams
from .runtime.trainer import SLICE
from .schedule import schedule, schedule_smallest
from .scheduler import Plan, Problem, evaluate
from .spill import DOMAIN
from .targets import ORT_TRAINING, SPILL_SUFFIX, Target, target_named
from .training_graph import GRADIENT_BUFFER, TrainingGraph, build_training_graph
from .units import Budget, format_bytes
from .writes import writes_of

Progress = Callable[[str], None]

#: What the runtime itself takes during the first step beyond arena and arrays: stacks and packing buffers of its threads, lazily bound
#: code.
RUNTIME_BYTES = 3 * 2**20
#: Processor cores that others may use during a measurement before that is told.
_BUSY_CORES = 0.25


@dataclass(frozen=True, slots=True)
class Request:
    """What to compile.

    Attributes:
        source: ``package.module:factory``, ``zoo:NAME``, a ``.onnx`` file, or a label for a graph that is given.
        inputs: the batch.
        labels: the labels; empty: as the loss needs them.
        loss: the loss; None: the model's own scalar output.
        optimizer: how parameters follow gradients.
        budget: the memory budget of a step.
        strategy: scheduling strategy.
        time_limit: seconds that planning may take.
        work_limit: moves of local search that planning may take; None for as many as are worth it.
        seed: of the model's initial weights and of planning.
        threads: intra-op threads of the machine that trains; 0 is the runtime's default.
        costs: "measured" on this machine or "analytic".
        conv_layout: "nchwc" for the blocked convolutions of x86-64, "nchw" for a file that loads on every processor, "auto" for what suits this
            machine.
        target: name of the target (``onnxremat.targets``).
        freeze: patterns of parameters that are not trained, such as ``backbone.*``.
        train_mode: of a .onnx file: turn inference BatchNormalization and Dropout into their training forms.
        verify: check the numbers when done.
        swap: which tensors may be swapped, and where to.
        cuda: the GPU to train on; None for the CPU.

    Raises:
        UsageError: a number is outside what it may be.
    """

    source: str
    inputs: tuple[InputSpec, ...] = ()
    labels: tuple[InputSpec, ...] = ()
    loss: Loss | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    budget: Budget = field(default_factory=lambda: Budget(1.0, relative=True))
    strategy: str = "auto"
    time_limit: float = 60.0
    work_limit: int | None = None
    seed: int = 0
    threads: int = 0
    costs: str = "measured"
    conv_layout: str = "auto"
    target: str = ORT_TRAINING.name
    freeze: tuple[str, ...] = ()
    train_mode: bool = False
    verify: bool = True
    swap: Swap = field(default_factory=Swap)
    cuda: Cuda | None = None

    def __post_init__(self) -> None:
        require_seconds("a time limit", self.time_limit)
        require_whole("a work limit", 0 if self.work_limit is None else self.work_limit)
        require_whole("a seed", self.seed, most=LARGEST_SEED)
        require_whole("a number of threads", self.threads, most=MOST_THREADS)

    @property
    def provider(self) -> str:
        """``cpu`` or ``cuda``."""
        return "cpu" if self.cuda is None else "cuda"


def compile_source(request: Request, output: Path, progress: Progress = lambda _: None) -> Artifact:
    """Compile a source into an artifact folder, which appears whole or not at all.

    Raises:
        BudgetInfeasible: no plan fits; carries the smallest budget for which one was found.
        VerificationFailed: the numbers differ from the reference; nothing is left behind.
        OnnxRematError: of the kind that says what else went wrong.
    """
    progress(f"exporting {request.source}")
    forward, evaluation = export_source(request)
    return compile_graphs(forward, evaluation, request, output, progress)


def export_source(request: Request) -> tuple[ForwardGraph, ForwardGraph]:
    """The forward graph of a source, and its evaluation form; of a torch source from the cache where it is there."""
    if request.source.endswith(".onnx") or request.train_mode:  # which load_source refuses for a torch source
        forward = load_source(request.source, request.inputs, request.labels, request.loss, request.seed, request.train_mode)
        # The file is what is compiled, whatever module it was once exported from.
        forward.source |= {"kind": "onnx", "spec": "", "path": request.source}
        return forward, evaluation_form(forward)
    feeds = source_feeds(request.source, request.inputs, request.labels, request.loss)
    module = build_module(request.source, request.seed)
    forward = cached_export(module, feeds, request.seed, request.source)
    as_exported = Feeds(forward.inputs, forward.labels, loss_of(forward.source))
    return forward, cached_export(module.eval(), as_exported, request.seed, request.source)


def target_of(request: Request) -> Target:
    """The target of a request; raises UsageError where its options exclude each other."""
    target = target_named(request.target, request.provider)
    if request.swap.kind != "none" and target.tokens:
        raise UsageError(f"--swap {request.swap.kind} needs operators of its own, which --target {target.name} does without: leave one of them out")
    return target


def search_of(request: Request) -> Search:
    """How to plan the step of a request."""
    target = target_of(request)
    limits = (request.strategy, request.time_limit, request.seed, request.work_limit)
    return Search(*limits, fixed=target == ORT_TRAINING, portable=target.tokens)


def source_problem(request: Request, progress: Progress = lambda _: None) -> Problem:
    """The scheduling problem of a source's training step, with its costs and its channel for swaps, and nothing written."""
    target = target_of(request)
    _require_gpu(target, request)
    channel = swap_channel(request.swap)
    progress(f"exporting {request.source}")
    forward, _ = export_source(request)
    forward.freeze(request.freeze)
    progress("deriving the backward graph")
    optimizer = replace(request.optimizer, kernels=target.training_package)
    training = build_training_graph(forward, optimizer, resolve_layout(request.conv_layout, NCHWC in target.domains), target)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / files.UNSCHEDULED
        save_model(training.model, path)
        costs = node_costs(training, path, request, progress)
    return replace(training_problem(training, costs, request.source, target), transfer=channel)


def _require_gpu(target: Target, request: Request) -> bool:
    """Whether what is compiled can run here; raises RuntimeUnavailable, saying what is missing, where it can't and is to be measured."""
    here = not target.on_gpu or available()
    if not here and request.costs != "analytic":
        require_cuda()
    return here


def compile_module(module: Any, request: Request, output: Path, progress: Progress = lambda _: None) -> Artifact:
    """Compile a torch module as it is now: weights, modes and ``requires_grad`` included."""
    progress(f"exporting {request.source}")
    forward = export_torch(module, request.inputs, request.labels, request.loss, request.seed, request.source)
    modes = {name: sub.training for name, sub in module.named_modules()}
    try:  # not a copy: some modules hold tensors that cannot be copied
        evaluation = export_torch(module.eval(), forward.inputs, forward.labels, request.loss, request.seed, request.source)
    finally:
        for name, sub in module.named_modules():
            sub.training = modes[name]
    return compile_graphs(forward, evaluation, request, output, progress, module)


def loss_of(source: dict[str, Any]) -> Loss | None:
    """The loss that a forward graph's source names."""
    return None if source.get("loss") is None else Loss.from_options(source["loss"], source.get("loss_options", {}))


def compile_graphs(
    forward: ForwardGraph,
    evaluation: ForwardGraph,
    request: Request,
    output: Path,
    progress: Progress = lambda _: None,
    module: Any = None,
) -> Artifact:
    """Compile a forward graph and its evaluation form (both consumed); ``module`` is compared with where it is given."""
    target = target_of(request)
    if target.training_package:
        require_training_package()
    here = _require_gpu(target, request)
    forward_outputs = list(evaluation.outputs)
    forward.freeze(request.freeze)
    channel = swap_channel(request.swap)
    progress("deriving the backward graph")
    optimizer = replace(request.optimizer, kernels=target.training_package)
    training = build_training_graph(forward, optimizer, resolve_layout(request.conv_layout, NCHWC in target.domains), target)
    with whole_folder(output, files.ARTIFACT_FILES) as staging:
        reference = lay_out(training.model, target) if target.tokens else training.model
        save_model(reference, staging / files.UNSCHEDULED)
        costs = node_costs(training, staging / files.UNSCHEDULED, request, progress)
        problem = replace(training_problem(training, costs, request.source, target), transfer=channel)
        unscheduled = schedule_unscheduled(problem)
        search = replace(search_of(request), fixed=can_fix(training, target))
        begin = time.perf_counter()
        tell = planning_messages(unscheduled.plan.seconds, "s", progress)
        with Interruption(progress) as interruption:
            if request.budget.smallest:
                progress(f"planning {len(problem.ops)} ops into as little as can be found ({request.strategy})")
                found = schedule_smallest(problem, search, tell, interruption)
            else:
                budget = request.budget.resolve(problem.resident_bytes, needed(problem, unscheduled))
                progress(f"planning {len(problem.ops)} ops into {format_bytes(budget)} ({request.strategy})")
                found = schedule(problem, budget, search, tell, interruption)
        scheduled = replace(found, peak_unscheduled_bytes=unscheduled.peak_bytes)
        solve_seconds = time.perf_counter() - begin
        emitted = emit(training.model, problem, scheduled.plan, scheduled.placement.pen_bytes, target)
        save_model(emitted.model, staging / files.TRAINING)
        note = swap_note(request.swap, problem, scheduled.plan.swapped_tensors, scheduled.plan.recomputed_ops)
        if note:
            progress(note)
        check_order(staging / files.TRAINING if here else cpu_copy(staging / files.TRAINING), emitted, target, request.cuda if here else None)
        streams = {str(n.name): n.metadata_props[STREAM] for n in emitted.model.graph if STREAM in n.metadata_props}
        if streams:
            write_json(staging / files.PARTITION, predicted([str(n.name) for n in emitted.model.graph], streams))
        loss_options = forward.source.get("loss_options", {})
        evaluated = open_batch(
            eval_model(evaluation, training, target),
            (*training.inputs, *training.labels),
            training.weights | _zeros(training),
            training.loss,
            summed=loss_options.get("reduction") == "sum",
        )
        save_model(evaluated.model, staging / files.EVAL)
        updates = {} if optimizer.in_graph else optimizer_models(training.optimizer, training.trainable)
        for name, model in updates.items():
            onnx.save(model, str(staging / name))
        trained = set() if optimizer.in_graph else set(training.trainable)
        save_checkpoint(
            staging,
            target,
            {name: training.weights[name] for name in training.trainable if name in trained},
            {name: array for name, array in training.weights.items() if name not in trained} | _zeros(training),
        )
        if scheduled.placement.offsets:
            write_json(staging / files.OFFSETS, offsets_by_name(problem, scheduled))
        problem.save(staging / files.PROBLEM)
        scheduled.plan.save(staging / files.PLAN)
        manifest = _manifest(training, forward_outputs, problem, scheduled, emitted, request, costs, solve_seconds)
        manifest["arena_claim"] = _claim_into(staging, int(manifest["arena"]["max_mem"])) if request.cuda is None else None
        manifest["swap"] = None if channel is None else _swaps(problem, scheduled.plan, note)
        manifest["eval_batch"] = {"open": not evaluated.reason, "reason": evaluated.reason}
        manifest["optimizer_models"] = {name: _updates(model) for name, model in updates.items()}
        manifest["files"] = file_digests(staging)
        write_json(staging / files.MANIFEST, manifest)
        if request.verify:
            progress("verifying")
            _verify_into(staging, manifest, request, module)
        from .report import write_report

        write_report(Artifact.load(staging), staging / files.REPORT)
    return Artifact.load(output)


def can_fix(training: TrainingGraph, target: Target) -> bool:
    """Whether tensors may get offsets of their own: the order must be the file's, and the model one that the runner can extend."""
    native = all(v.dtype is None or v.dtype.numpy().isbuiltin == 1 for node in training.graph for v in node.outputs)
    return target == ORT_TRAINING and native and not has_large_constants(training.model)


def offsets_by_name(problem: Problem, scheduled: Scheduled) -> dict[str, int]:
    """The offsets of a plan's tensors under the names that these have in the scheduled graph."""
    names = made_names(problem, lowered(problem, scheduled.plan))
    return {names[made]: offset for made, offset in scheduled.placement.offsets.items()}


def _zeros(training: TrainingGraph) -> dict[str, Any]:
    """Moments that are part of the graph start at zero, as frozen parameters of the checkpoint."""
    return {name: np.zeros(shape, np.float32) for name, shape in training.moments.items()}


def node_costs(training: TrainingGraph, model_path: Path, request: Request, progress: Progress) -> Costs:
    """Costs of the unscheduled step as the request wants them."""
    if request.costs == "analytic":
        if request.cuda is None:
            return analytic_costs(training.graph, threads=request.threads)
        return replace(analytic_costs(training.graph, GPU), workspace_bytes=gpu_workspace(training.graph))
    progress("measuring the unscheduled step on this machine")
    first = {LEARNING_RATE: np.array([training.optimizer.learning_rate], np.float32), STEP: np.ones(1, np.int64)}
    values = training.weights | _zeros(training) | first
    costs = measured_costs(training.graph, model_path, values, request.threads, cuda=request.cuda)
    if costs.load is not None and costs.load > _BUSY_CORES:
        progress(f"other processes kept {costs.load:.1f} cores busy while the step was measured: its seconds are too high")
    return costs


def training_problem(training: TrainingGraph, costs: Costs, name: str, target: Target = ORT_TRAINING) -> Problem:
    """The scheduling problem of a training graph, optimizer phase included."""
    resident = training.resident() | {"runtime": RUNTIME_BYTES + heap_bytes(training.graph, target.tokens)}
    optimizer_peak = 0 if training.optimizer.in_graph else sum(resident.values()) + _optimizer_bytes(training)
    return scheduling_problem(training.graph, costs, resident, name, optimizer_peak, target.shares_measured)


def _optimizer_bytes(training: TrainingGraph) -> int:
    """Room that the separate optimizer needs: it works on a slice of a parameter at a time, and a small parameter is less than a slice."""
    largest = max((math.prod(training.weights[name].shape) for name in training.trainable), default=0)
    return OPTIMIZER_BYTES * min(largest, SLICE) // SLICE


def check_order(path: Path | bytes, emitted: Emitted, target: Target = ORT_TRAINING, cuda: Cuda | None = None) -> None:
    """Ask the runtime for the order it will run the file in; raises ArtifactError where it is not the plan's or a clone is gone.

    A file that is ordered by tokens is asked about at every optimization level, in the order that is the runtime's default.
    """
    for options in [Options(cuda=cuda), *(Options(level=level, file_order=False) for level in LEVELS if target.tokens)]:
        _check_order(path, emitted, options)


def _check_order(path: Path | bytes, emitted: Emitted, options: Options) -> None:
    planned = [str(n.name) for n in emitted.model.graph]
    streams = execution_streams(path, options)
    missing = set(emitted.clones) - {name for stream in streams for name in stream}
    if missing:
        raise ArtifactError(
            f"ONNX Runtime removed {len(missing)} of {len(emitted.clones)} recomputes, '{min(missing)}' among them; the plan's memory would not hold"
        )
    helpers = {str(n.name) for n in emitted.model.graph if is_helper(n)}
    ours = set(planned) - helpers
    for stream in streams:
        real = [n for n in stream if n in ours]
        there = set(real)
        wanted = [n for n in planned if n in there]
        if real != wanted:
            at = next(i for i, (a, b) in enumerate(zip(real, wanted, strict=True)) if a != b)
            raise ArtifactError(f"ONNX Runtime would run '{real[at]}' where the plan has '{wanted[at]}'; the plan's memory would not hold")
    gone = ours - {name for stream in streams for name in stream}
    if gone:
        raise ArtifactError(f"ONNX Runtime removed {len(gone)} nodes, '{min(gone)}' among them; the plan's memory would not hold")


def _manifest(
    training: TrainingGraph,
    outputs: Sequence[str],
    problem: Problem,
    scheduled: Scheduled,
    emitted: Emitted,
    request: Request,
    costs: Costs,
    solve_seconds: float,
) -> dict[str, Any]:
    plan, placement = scheduled.plan, scheduled.placement
    alone = fit_arena_alone(problem, plan) if placement.block_bytes else scheduled
    return {
        "format": files.FORMAT,
        "version": files.VERSION,
        "target": request.target + (SPILL_SUFFIX if plan.swapped_tensors and request.swap.kind == "disk" else ""),
        "provider": request.provider,
        "provider_options": {} if request.cuda is None else provider_options(request.cuda),
        "source": copy.deepcopy(training.source),
        "inputs": [str(s) for s in training.inputs],
        "labels": [str(s) for s in training.labels],
        "optimizer": asdict(training.optimizer),
        "update": "fused" if training.optimizer.fused else "in the training graph" if training.optimizer.in_graph else "separate",
        "writes": writes_of(emitted.model.metadata_props),
        "roles": {
            "loss": training.loss,
            "outputs": list(outputs),
            "trainable": list(training.trainable),
            "frozen": list(training.frozen),
            "state": list(training.state),
            "moments": list(training.moments),
            "gradients": training.gradients,
            "dropout_masks": list(training.dropout_masks),
            "random_values": list(training.random_values),
        },
        "memory": {
            "budget_bytes": plan.budget_bytes,
            "resident": dict(problem.resident),
            "resident_bytes": problem.resident_bytes,
            "runtime_bytes": problem.resident["runtime"],
            "allocator": "fixed offsets" if placement.block_bytes else "best-fit arena",
            "arena_bytes": scheduled.arena_bytes,
            "block_bytes": placement.block_bytes,
            "peak_predicted_bytes": scheduled.peak_bytes,
            "peak_live_bytes": plan.peak_bytes,
            "peak_unscheduled_bytes": scheduled.peak_unscheduled_bytes,
            "peak_arena_alone_bytes": alone.peak_bytes,
            "fragmentation": placement.fragmentation,
        },
        "time": {
            "costs": costs.origin,
            "cores_busy_otherwise": costs.load,
            "seconds_unscheduled": plan.seconds_unscheduled,
            "seconds_predicted": plan.seconds,
            "seconds_lower_bound": plan.seconds_lower_bound,
            "solve_seconds": solve_seconds,
        },
        "plan": {
            "strategy": plan.strategy,
            "recomputed_ops": plan.recomputed_ops,
            "swapped_tensors": plan.swapped_tensors,
            "clones": list(emitted.clones),
        },
        "session_options": SESSION_OPTIONS,
        "arena": arena_settings(alone.arena_bytes),
        "threads": request.threads,
        "conv_layout": "nchwc" if NCHWC in training.graph.opset_imports else "nchw",
        "versions": {
            name: _version(name) for name in ("onnxremat", "onnx", "onnx-ir", *TRAINING_PACKAGES, *STOCK_PACKAGES, "torch") if _version(name)
        },
        "verification": None,
        "files": {},
    }


def _claim_into(folder: Path, capacity: int) -> dict[str, Any] | None:
    """Write the model that other programs run first where the arena must be claimed whole; what the manifest says of it, None without need."""
    if not needs_claim(capacity):
        return None
    onnx.save(claim_model(capacity), str(folder / files.ARENA_CLAIM))
    return {"model": files.ARENA_CLAIM, "shape": claim_shape(capacity)}


def _updates(model: onnx.ModelProto) -> dict[str, Any]:
    """Of an optimizer model: parameter that it updates -> input of the training graph that collects its gradient, and which output
    replaces which of the model's inputs."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    names = metadata["onnxremat.parameters"].split("\n")
    return {"parameters": {name: name + GRADIENT_BUFFER for name in names}, "writes": writes_of(metadata)}


def _swaps(problem: Problem, plan: Plan, note: str) -> dict[str, Any]:
    """What the manifest says of swaps; an artifact with some needs the operator library of ``onnxremat.spill`` and is not portable."""
    channel = problem.transfer
    assert channel is not None
    return {
        "kind": "host" if channel.overlap else "disk",
        "operators": "" if channel.overlap else DOMAIN,
        "portable": not plan.swapped_tensors,
        "bytes_per_second_out": channel.bytes_per_second_out,
        "bytes_per_second_in": channel.bytes_per_second_in,
        "host_bytes" if channel.overlap else "disk_bytes": evaluate(problem, plan.steps).host_bytes,
        "note": note,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        from . import __version__

        return __version__ if name == "onnxremat" else None


def _verify_into(folder: Path, manifest: dict[str, Any], request: Request, module: Any) -> None:
    from .verification import verify_artifact

    result = verify_artifact(Artifact.load(folder), threads=request.threads, measure=True, module=module, cuda=request.cuda)
    if not result.passed:
        raise VerificationFailed(
            f"the compiled step does not reproduce its reference: {result.reason}; nothing was written (--no-verify keeps the artifact)"
        )
    manifest["verification"] = asdict(result)
    write_json(folder / files.MANIFEST, manifest)
