"""Is this environment fit to compile and train?  Each finding with its fix."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_folder, cache_root
from .errors import OnnxRematError, RuntimeUnavailable


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: ``ok``, ``warning`` or ``error``, what was found, and what to do."""

    check: str
    status: str
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """All checks."""
    return [_python(), _runtime(), _kernels(), *_packages(), _compiled(), _spill(), _torch(), _measuring(), _cuda(), _cache()]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding(
        "python",
        "ok" if good else "warning",
        version,
        "" if good else "onnxruntime-training 1.19.2 has wheels up to Python 3.12: use 3.11 or 3.12",
    )


def _runtime() -> Finding:
    from .runtime.ort import TRAINING_VERSION, installed_packages, onnxruntime

    found = ", ".join(f"{n} {v}" for n, v in installed_packages().items()) or "none"
    try:
        module = onnxruntime()
    except RuntimeUnavailable as error:
        return Finding("onnxruntime", "error", found, str(error))
    if module.__version__ != TRAINING_VERSION:
        return Finding("onnxruntime", "warning", found, f"memory and kernels were measured on {TRAINING_VERSION}")
    return Finding("onnxruntime", "ok", f"{found}; providers {', '.join(module.get_available_providers())}")


def _kernels() -> Finding:
    """A one-node training step, run."""
    try:
        import numpy as np
        from onnx import TensorProto, helper

        from .runtime.session import BoundSession, Options, make_session

        node = helper.make_node("InPlaceAccumulatorV2", ["a", "b", "c"], ["d"], domain="com.microsoft")
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "ab"] + [
            helper.make_tensor_value_info("c", TensorProto.BOOL, [1])
        ]
        graph = helper.make_graph([node], "probe", inputs, [helper.make_tensor_value_info("d", TensorProto.BOOL, [1])])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)], ir_version=10)
        session = BoundSession(make_session(model.SerializeToString(), Options(arena=False)))
        target = np.zeros(2, np.float32)
        session.bind({"a": target, "b": np.ones(2, np.float32), "c": np.asarray([True])})
        session.run()
        if target.tolist() != [1.0, 1.0]:
            return Finding("training kernels", "error", f"in-place write gave {target.tolist()}", "reinstall onnxruntime-training-cpu")
    except OnnxRematError as error:
        return Finding("training kernels", "error", str(error), "install onnxruntime-training-cpu==1.19.2")
    return Finding("training kernels", "ok", "in-place accumulation works")


def _packages() -> list[Finding]:
    findings = []
    for name in ("onnx", "onnx-ir", "onnxscript", "numpy", "scipy"):
        try:
            findings.append(Finding(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "error", "not installed", f"pip install {name}"))
    return findings


def _compiled() -> Finding:
    """The inner loops of planning."""
    from .placement import compaction, offsets
    from .scheduler.annealer import library

    loops = (("annealer", library()), ("arena", compaction.compiled()), ("offsets", offsets.compiled()))
    missing = [name for name, found in loops if found is None]
    if missing:
        return Finding(
            "compiled planning",
            "warning",
            f"without {' and '.join(missing)}: planning does some hundred times fewer moves",
            "install a C compiler, then onnxremat again",
        )
    return Finding("compiled planning", "ok", "annealer, arena and offsets are compiled")


def _spill() -> Finding:
    """The operators for swapping to disk, run once in the folder that is swapped to."""
    from .spill import probe

    try:
        where, in_memory = probe()
    except OnnxRematError as error:
        return Finding("swap to disk", "warning", "not possible here; recomputing works without it", str(error))
    if in_memory:
        return Finding(
            "swap to disk",
            "warning",
            f"{where} is a file system in memory, so swapping to it saves none",
            "choose a folder on a disk with --spill-dir or ONNXREMAT_SPILL_DIR",
        )
    return Finding("swap to disk", "ok", f"the operators work in {where}")


def _torch() -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch",
            "warning",
            "not installed",
            "needed to export PyTorch models and to compare with torch, not to train: pip install torch",
        )
    good = tuple(int(p) for p in version.split("+")[0].split(".")[:2]) >= (2, 13)
    return Finding("torch", "ok" if good else "warning", version, "" if good else "the exporter was measured on torch 2.13: pip install -U torch")


def _measuring() -> Finding:
    if not Path("/proc/self/clear_refs").exists():
        return Finding(
            "measured peak",
            "warning",
            sys.platform,
            "the peak of a process can be measured on Linux only; budgets are still enforced by the arena",
        )
    return Finding("measured peak", "ok", "/proc/self/status and clear_refs are there")


def _cuda() -> Finding:
    """Driver, package and devices, in the order in which they are needed; CUDA itself is not started by the runtime here."""
    from .runtime.cuda import INSTALL, PROVIDER, find_driver
    from .runtime.ort import onnxruntime

    try:
        driver = find_driver()
        found = f"driver for CUDA {driver.version()}; " + (", ".join(map(driver.name, range(driver.devices()))) or "no device")
        devices = driver.devices()
    except RuntimeUnavailable as error:
        found, devices = str(error), 0
    try:
        packaged = PROVIDER in onnxruntime().get_available_providers()
    except RuntimeUnavailable:
        packaged = False
    if not packaged:
        return Finding("cuda", "ok", f"not used, the package at hand is for the CPU; {found}", "" if not devices else f"to train on it: {INSTALL}")
    if not devices:
        return Finding(
            "cuda",
            "warning",
            f"the package is there, but {found}",
            "asking for CUDA would abort the process, so onnxremat does not: install the driver, or train with --provider cpu",
        )
    return Finding("cuda", "ok", found, "python -m benchmarks.gpu_check shows what works on it")


def _cache() -> Finding:
    folder = cache_folder("profiles")
    if folder is None:
        return Finding(
            "cache",
            "warning",
            str(cache_root()),
            "profiles can't be kept: set ONNXREMAT_CACHE to a writable folder",
        )
    return Finding("cache", "ok", str(folder.parent))
