"""Do the numbers hold?  The scheduled step against the unscheduled one, bit for bit, and against torch within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from .artifact import TRAINING, UNSCHEDULED, Artifact
from .copies import cpu_twin
from .drawn import NotComparable, given_draws
from .exporters import ExportError, Loss, build_module
from .optimizers import STEP
from .runtime import worker
from .runtime.block import Block, fixed_session
from .runtime.cuda import Cuda, Slab, available, require_cuda
from .runtime.session import BoundSession, Options, make_session, with_extra_outputs, with_random_seeds
from .training_graph import GRADIENT_BUFFER, LAZY_RESET

Array = npt.NDArray[Any]

#: Largest relative error against torch that float32 arithmetic in another order explains in a well-conditioned model.
TORCH_TOLERANCE = 1e-3
#: Batches tried for the comparison with torch: rounding may tip a ReLU or a maximum the other way on one, a wrong rule is wrong on each.
_TRIES = 3
#: Beyond TORCH_TOLERANCE, an error may be this many times what torch itself changes by when its weights are perturbed by rounding.
_NOISE_FACTOR = 5.0
_ROUNDING = 2.0**-22
#: A gradient below this share of the root mean square of all is rounding left over from cancellation (a bias before a batch normalization
#: has a gradient of exactly zero): its error is taken relative to this share instead.
_NEGLIGIBLE = 1e-2


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked.

    Attributes:
        passed: every check that could be made.
        bitwise_equal: losses, gradients and parameters of the scheduled step equal the unscheduled one's bit for bit, over several steps,
        dropout on.
        state_equal: so do running statistics and counters, and they equal torch's within tolerance.
        max_relative_error_torch: worst relative error of loss, gradients and state against torch; None where the model can't be imported.
        steps: steps compared.
        tolerance_torch: what was allowed: TORCH_TOLERANCE, or more where torch's own gradients move by more when its weights are perturbed
        by rounding.
        peak_measured_bytes: peak of a capped run in a process of its own; None where it was not measured.
        within_budget: whether that is within the budget; None on a GPU, where it contains the runtime's libraries.
        allocator: how the step's buffers got their memory there.
        reason: why it did not pass, or why a comparison was left out.
    """

    passed: bool
    bitwise_equal: bool
    state_equal: bool
    max_relative_error_torch: float | None
    steps: int
    tolerance_torch: float = TORCH_TOLERANCE
    peak_measured_bytes: int | None = None
    within_budget: bool | None = None
    reason: str = ""
    allocator: str = ""


def verify_artifact(
    artifact: Artifact,
    steps: int = 3,
    threads: int = 0,
    seed: int = 0,
    measure: bool = True,
    module: Any = None,
    cuda: Cuda | None = None,
    provider: str | None = None,
) -> Verification:
    """Check an artifact.

    Args:
        artifact: what to check.
        steps: training steps over which the scheduled and the unscheduled graph are compared.
        threads: intra-op threads.
        seed: of the batches, dropout masks and random numbers.
        measure: also run it capped in a process of its own and compare its peak with the budget.
        module: the torch module that was compiled; built from the artifact's source where it is not given.
        cuda: the GPU; None for the one that it was compiled for.
        provider: ``cpu`` or ``cuda``; None for the artifact's, or the CPU where there is no GPU (``reason`` says so then).
    """
    reasons: list[str] = []
    where = Where.of(artifact, cuda, provider)
    if where.twin:
        reasons.append("compared on the CPU, its peak not measured: there is no GPU here" if provider is None else "compared on the CPU")
        measure = False
    different = compare_schedules(artifact, steps, threads, seed, where)
    if different:
        reasons.append(f"'{different[0]}' differs from the unscheduled step ({len(different)} tensors do)")
    state = set(artifact.manifest["roles"]["state"])
    error, state_error, tolerance, why = torch_error(artifact, threads, seed, module, where)
    if error is None:
        reasons.append(f"not compared with torch: {why}")
    elif error > tolerance:
        reasons.append(f"the worst relative error against torch is {error:.2g}, in '{why}'")
    peak = within = None
    if measure:
        budget = int(artifact.manifest["memory"]["budget_bytes"])
        peak = worker.call("onnxremat.runtime.run:measure_job", artifact=str(artifact.path), steps=2, threads=threads)["peak_measured_bytes"]
        # What a process takes of a GPU is more than its step: libraries load their kernels there. The arena's cap is what holds the step.
        within = peak <= budget if where.cuda is None else None
        if within is False:
            reasons.append(f"the process reached {peak} bytes, the budget is {budget}")
    numbers = not different and (error is None or error <= tolerance)
    return Verification(
        passed=numbers and within is not False,
        bitwise_equal=not different,
        state_equal=not (state & set(different)) and (state_error is None or state_error <= tolerance),
        max_relative_error_torch=error,
        tolerance_torch=tolerance,
        steps=steps,
        peak_measured_bytes=peak,
        within_budget=within,
        reason="; ".join(reasons),
        allocator=artifact.manifest["memory"].get("allocator", ""),
    )


@dataclass(frozen=True, slots=True)
class Where:
    """Where graphs are run to be compared.

    Attributes:
        cuda: the GPU; None for the CPU.
        twin: copies between GPU and host become copies on the CPU, where the artifact is for a GPU and there is none.
    """

    cuda: Cuda | None = None
    twin: bool = False

    @classmethod
    def of(cls, artifact: Artifact, cuda: Cuda | None = None, provider: str | None = None) -> Where:
        """Where an artifact is compared: on the GPU that it is for, or, where there is none, on the CPU."""
        on_gpu = (provider or artifact.provider) == "cuda"
        if provider == "cuda":
            require_cuda(cuda or artifact.cuda or Cuda())
        return cls(cuda or artifact.cuda or Cuda()) if on_gpu and available() else cls(None, artifact.provider == "cuda")


class _Run:
    """A graph of the artifact with arrays of its own, updated by plain gradient descent so that parameters move between steps."""

    def __init__(self, artifact: Artifact, name: str, threads: int, seed: int, outputs: list[str] | None = None, where: Where | None = None) -> None:
        where = where or Where.of(artifact)
        model = with_random_seeds(artifact.file(name), seed)
        if outputs:
            model = with_extra_outputs(model, outputs)
        if where.twin:
            model = bytes(cpu_twin(onnx.load_from_string(model)).SerializeToString())
        options = Options(threads=threads, cuda=where.cuda)
        self._block = Block.of(artifact) if name == TRAINING and not outputs and where == Where() else None
        self.session = BoundSession(make_session(model, options)) if self._block is None else fixed_session(model, self._block, options)
        weights = artifact.parameters()
        self.in_place = artifact.target.in_place
        self.arrays: dict[str, Array] = {}
        for entry in self.session.session.get_inputs():
            dtype = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}.get(entry.type)
            given = weights.get(entry.name)
            self.arrays[entry.name] = np.array(given) if given is not None else np.zeros(entry.shape, dtype or np.float32)
        for spec in (*artifact.inputs, *artifact.labels):
            if spec.name in self.arrays:
                self.arrays[spec.name] = np.zeros(spec.shape, spec.dtype)
        for name_, value in ((LAZY_RESET, True), ("learning_rate", artifact.optimizer.learning_rate), (STEP, 0)):
            if name_ in self.arrays:
                self.arrays[name_][...] = value
        self._slab = None if where.cuda is None else Slab(require_cuda(where.cuda), where.cuda.device, self.arrays)
        self.session.bind(self.arrays if self._slab is None else self._slab.arrays)

    def step(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        for name, array in batch.items():
            if name in self.arrays:
                self.arrays[name][...] = array
        if STEP in self.arrays:
            self.arrays[STEP] += 1
        if not self.in_place:
            for name in self.arrays:
                if name.endswith(GRADIENT_BUFFER):
                    self.arrays[name][...] = 0
        if self._slab is None:
            return dict(zip(self.session.outputs, self.session.run(), strict=True))
        for name, array in self.arrays.items():
            self._slab.write(name, array)
        results = dict(zip(self.session.outputs, self.session.run(), strict=True))
        for name, array in self.arrays.items():
            self._slab.read_into(name, array)
        return results

    def close(self) -> None:
        """Give memory of the GPU back."""
        if self._slab is not None:
            self._slab.close()

    def descend(self, rate: float = 0.01) -> None:
        for name, array in self.arrays.items():
            if name.endswith(GRADIENT_BUFFER):
                self.arrays[name.removesuffix(GRADIENT_BUFFER)] -= rate * array


def compare_schedules(artifact: Artifact, steps: int, threads: int = 0, seed: int = 0, where: Where | None = None) -> list[str]:
    """Run the scheduled and the unscheduled graph side by side; the names of tensors that differ in any bit, after any step."""
    rng = np.random.default_rng(seed)
    specs = [*artifact.inputs, *artifact.labels]
    scheduled, reference = (_Run(artifact, name, threads, seed, where=where) for name in (TRAINING, UNSCHEDULED))
    loss = artifact.manifest["roles"]["loss"]
    for _ in range(steps):
        batch = {spec.name: spec.sample(rng) for spec in specs}
        left, right = scheduled.step(batch), reference.step(batch)
        different = [] if left[loss].tobytes() == right[loss].tobytes() else [loss]
        different += [n for n, a in scheduled.arrays.items() if a.tobytes() != reference.arrays[n].tobytes()]
        if different:
            return sorted(different)
        scheduled.descend()
        reference.descend()
    scheduled.close()
    reference.close()
    return []


def torch_error(
    artifact: Artifact, threads: int = 0, seed: int = 0, module: Any = None, where: Where | None = None
) -> tuple[float | None, float | None, float, str]:
    """The unscheduled step against torch's autograd, with the very dropout masks and random numbers that ONNX Runtime drew.

    Returns:
        The worst relative error, that of the state alone, the tolerance, and the tensor with the worst one; None, None, the tolerance and
        the reason where it can't be compared.
    """
    source = artifact.manifest["source"]
    if module is None and (source.get("kind") != "torch" or ":" not in source.get("spec", "")):
        return None, None, TORCH_TOLERANCE, "the source is not an importable torch factory"
    try:
        module = build_module(source["spec"], int(source["seed"])) if module is None else module
        return compare_with_torch(artifact, module, threads, seed, where)
    except (ExportError, NotComparable) as error:
        return None, None, TORCH_TOLERANCE, str(error)


def compare_with_torch(
    artifact: Artifact, module: Any, threads: int = 0, seed: int = 0, where: Where | None = None
) -> tuple[float, float, float, str]:
    """As ``torch_error``, for a module at hand, which is left as it was."""
    best: tuple[float, float, float, str] | None = None
    state_names = artifact.manifest["roles"]["state"]
    for attempt in range(_TRIES):
        trial = _Comparison(artifact, module, threads, seed + attempt, where)
        errors = trial.errors()
        name = max(errors, key=lambda n: errors[n])
        tolerance = TORCH_TOLERANCE
        if errors[name] > tolerance:
            tolerance = max(tolerance, _NOISE_FACTOR * trial.noise())
        state = max((errors[n] for n in state_names if n in errors), default=0.0)
        if best is None or errors[name] / tolerance < best[0] / best[2]:
            best = (errors[name], state, tolerance, name)
        if best[0] <= TORCH_TOLERANCE / 10:
            break
    assert best is not None
    return best


class _Comparison:
    """One batch through ONNX Runtime's unscheduled graph and through torch."""

    def __init__(self, artifact: Artifact, module: Any, threads: int, seed: int, where: Where | None = None) -> None:
        self.artifact, self.module = artifact, module
        self.roles = artifact.manifest["roles"]
        masks, values = list(self.roles["dropout_masks"]), list(self.roles.get("random_values", ()))
        self.run = _Run(artifact, UNSCHEDULED, threads, seed, [*masks, *values], where)
        self.before = {name: array.copy() for name, array in self.run.arrays.items()}
        rng = np.random.default_rng(seed)
        self.batch = {spec.name: spec.sample(rng) for spec in (*artifact.inputs, *artifact.labels)}
        results = self.run.step(self.batch)
        self.draws = ([results[name] for name in masks], [results[name] for name in values])
        self.loss = results[self.roles["loss"]]
        self.run.close()

    def errors(self) -> dict[str, float]:
        """Tensor -> relative error of ONNX Runtime against torch."""
        expected = self._torch(0.0)
        found = {self.roles["loss"]: self.loss}
        for name in expected:
            if name in self.roles["state"]:
                found[name] = self.run.arrays[name]
            elif name != self.roles["loss"]:
                found[name] = _gradient(self.artifact, self.run, self.before, name)
        return self._compare(found, expected)

    def noise(self) -> float:
        """The worst relative change of torch's own results when its parameters are perturbed by a rounding error."""
        return max(self._compare(self._torch(_ROUNDING), self._torch(0.0)).values())

    def _compare(self, found: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
        gradients = [g for n, g in expected.items() if n in self.roles["trainable"]]
        scale = float(np.sqrt(np.mean([np.mean(np.square(g, dtype=np.float64)) for g in gradients]))) if gradients else 0.0
        return {n: _relative(found[n], e, _NEGLIGIBLE * scale if n in self.roles["trainable"] else 0.0) for n, e in expected.items()}

    def _torch(self, perturbation: float) -> dict[str, Array]:
        """Loss, gradients and new state by torch, its parameters multiplied by 1 + perturbation * noise."""
        import torch

        from .exporters.module_copy import copy_module

        module = copy_module(self.module)
        if perturbation:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dtype.is_floating_point:
                        parameter.mul_(1 + perturbation * torch.randn(parameter.shape, generator=generator))
        loss = _torch_loss(self.artifact, module, {n: torch.from_numpy(np.array(a)) for n, a in self.batch.items()}, *self.draws)
        loss.backward()
        optimizer = self.artifact.optimizer
        if optimizer.in_graph and optimizer.clip_grad_norm:  # the update in the graph shows clipped gradients
            trained = [p for n, p in module.named_parameters() if n in self.roles["trainable"]]
            torch.nn.utils.clip_grad_norm_(trained, optimizer.clip_grad_norm)
        results: dict[str, Array] = {self.roles["loss"]: loss.detach().numpy()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.grad is not None and name in self.roles["trainable"]:
                results[name] = parameter.grad.numpy()
        results |= {name: buffer.numpy() for name, buffer in module.named_buffers() if name in self.roles["state"]}
        return results


def _gradient(artifact: Artifact, run: _Run, before: Mapping[str, Array], name: str) -> Array:
    """The gradient of a parameter: accumulated, or what the update in the graph made of it."""
    buffer = run.arrays.get(name + GRADIENT_BUFFER)
    if buffer is not None:
        return buffer
    optimizer = artifact.optimizer
    if optimizer.name == "adamw":  # its first moment was zero before
        return run.arrays[name + optimizer.moments[0]] / (1 - optimizer.beta1)
    step: Array = (before[name].astype(np.float64) - run.arrays[name]) / optimizer.learning_rate
    if optimizer.momentum:
        step = run.arrays[name + ".momentum"].astype(np.float64)
    return step - optimizer.decay_of(name) * before[name]


def _relative(found: Array, expected: Array, floor: float) -> float:
    """Error in the root-mean-square norm, relative to the expected values' or to ``floor`` (per element) where those vanish."""
    found, expected = np.asarray(found, np.float64).reshape(-1), np.asarray(expected, np.float64).reshape(-1)
    size = max(float(np.sqrt(np.mean(np.square(expected)))) if expected.size else 0.0, floor, 1e-12)
    error = float(np.sqrt(np.mean(np.square(found - expected)))) if expected.size else 0.0
    return error / size if np.isfinite(error) else float("inf")


def _torch_loss(artifact: Artifact, module: Any, batch: Mapping[str, Any], masks: Sequence[Array], values: Sequence[Array]) -> Any:
    import torch

    source = artifact.manifest["source"]
    loss = None if source.get("loss") is None else Loss.from_options(source["loss"], source.get("loss_options", {}))
    own = loss is None or loss.name == "output"
    names = [s.name for s in artifact.inputs] + ([s.name for s in artifact.labels] if own else [])
    with given_draws(masks, values), torch.enable_grad():
        output = call_module(module, {n: batch[n] for n in names})
    outputs = _flatten(output)
    if own:
        scalars = [t for t in outputs if t.dtype.is_floating_point and t.numel() == 1]
        return scalars[0].reshape(())
    assert loss is not None
    return loss.torch(outputs[_read_index(artifact, loss)], batch[artifact.labels[0].name])


def _read_index(artifact: Artifact, loss: Loss) -> int:
    """Which output of the model the loss reads."""
    wanted = getattr(loss, "output", None)
    names = list(artifact.manifest["roles"]["outputs"])
    return names.index(wanted) if wanted in names else 0


def call_module(module: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a module with its inputs as the exporter does: by name where its forward has those names, else by position."""
    from .exporters.trace import bind_inputs

    return module(*arguments.values()) if bind_inputs(module, list(arguments)) is None else module(**arguments)


def _flatten(output: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree

    leaves, _ = _pytree.tree_flatten(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
