"""CUDA: is it there, what its provider is told, and memory of the device that tensors stay in between steps.

Nothing here asks ONNX Runtime for CUDA before the driver has been found: with the CUDA libraries but without ``libcuda.so.1`` the provider
aborts the process.  Memory is taken through the driver, which every machine with a GPU has, in its primary context, which the runtime uses too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OnnxRematError, OutOfBudget, RuntimeUnavailable, UsageError
from .ort import TRAINING_VERSION, installed_packages, onnxruntime

Array = npt.NDArray[Any]

PROVIDER = "CUDAExecutionProvider"
DRIVER = "libcuda.so.1"
#: How the package with the CUDA provider is had.
INSTALL = f"pip install onnxruntime-training=={TRAINING_VERSION} (CUDA 11.8 and cuDNN 8; Python 3.8 to 3.11)"
#: Arrays in a slab begin at multiples of this, as cudaMalloc's do.
_ALIGNMENT = 256
_OUT_OF_MEMORY = 2


@dataclass(frozen=True, slots=True)
class Cuda:
    """The device to train on, as a user says it.

    Attributes:
        device: its number.
        options: further options of ONNX Runtime's CUDA provider, over those of :func:`provider_options`.
        allow_cpu_nodes: run although some nodes have no CUDA kernel; their tensors go to the host and back.
    """

    device: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    allow_cpu_nodes: bool = False

    @classmethod
    def parse(cls, options: Iterable[str] = (), allow_cpu_nodes: bool = False) -> Cuda:
        """From ``KEY=VALUE`` texts; raises UsageError."""
        found: dict[str, str] = {}
        for text in options:
            key, equals, value = text.partition("=")
            if not equals or not key.strip() or not value.strip():
                raise UsageError(f"--provider-option takes KEY=VALUE, such as cudnn_conv_algo_search=DEFAULT, not '{text}'")
            found[key.strip()] = value.strip()
        device = found.pop("device_id", "0")
        if not device.isdecimal():
            raise UsageError(f"--provider-option device_id={device}: the number of a device is 0 or more")
        if "gpu_mem_limit" in found:
            raise UsageError("--provider-option gpu_mem_limit: the limit is the plan's: give --budget, or run with --uncapped")
        return cls(int(device), found, allow_cpu_nodes)


def provider_options(cuda: Cuda, capacity: int | None = None) -> dict[str, str]:
    """What the CUDA provider is told.

    The arena grows by what is asked for; convolutions take their algorithm by rule, not by trial, which needs no large scratch memory and
    chooses the same one in every run; their scratch stays below 32 MiB; the runtime's own copies stay on the stream that computes.

    Args:
        cuda: the user's options, which come last.
        capacity: most bytes of the provider's own arena; None for no limit.
    """
    options = {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "DEFAULT",
        "cudnn_conv_use_max_workspace": "0",
        "do_copy_in_default_stream": "1",
        "use_tf32": "0",
    }
    options |= cuda.options
    options["device_id"] = str(cuda.device)
    if capacity is not None:
        options["gpu_mem_limit"] = str(capacity)
    return options


def require_cuda(cuda: Cuda = Cuda()) -> Driver:
    """The driver, after everything that CUDA needs has been looked for.

    Raises:
        RuntimeUnavailable: the package has no CUDA provider, there is no driver, or no such device.
    """
    if PROVIDER not in onnxruntime().get_available_providers():
        names = " ".join(installed_packages()) or "onnxruntime"
        raise RuntimeUnavailable(f"{names} has no CUDA provider: pip uninstall -y {names}, then {INSTALL}; or use --provider cpu")
    driver = find_driver()
    count = driver.devices()
    if cuda.device >= count:
        raise RuntimeUnavailable(f"there is no CUDA device {cuda.device}: the driver has {count}; give --provider-option device_id=NUMBER")
    return driver


def available() -> bool:
    """Whether a step can run on CUDA here."""
    try:
        require_cuda()
    except RuntimeUnavailable:
        return False
    return True


@cache
def find_driver(name: str = DRIVER) -> Driver:
    """The driver; raises RuntimeUnavailable where there is none or it does not start."""
    try:
        return Driver(ctypes.CDLL(name))
    except OSError as error:
        raise RuntimeUnavailable(
            f"there is no NVIDIA driver: {name} does not load ({error}); install it (in a container, pass the GPU through), or use --provider cpu"
        ) from error
    except AttributeError as error:
        raise RuntimeUnavailable(f"the NVIDIA driver is too old: {name} has no {error}") from error


class Driver:
    """The few functions of the CUDA driver that are needed (``cuda.h`` of CUDA 11 and later).

    Raises:
        RuntimeUnavailable: a call fails.
        OutOfBudget: the device has no room.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        pointer, size, handle, integer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        for name, types in {
            "cuInit": [ctypes.c_uint],
            "cuDriverGetVersion": [handle],
            "cuDeviceGetCount": [handle],
            "cuDeviceGet": [handle, integer],
            "cuDeviceGetName": [ctypes.c_char_p, integer, integer],
            "cuDevicePrimaryCtxRetain": [handle, integer],
            "cuCtxSetCurrent": [handle],
            "cuCtxSynchronize": [],
            "cuMemGetInfo_v2": [handle, handle],
            "cuMemAlloc_v2": [handle, size],
            "cuMemFree_v2": [pointer],
            "cuMemcpyHtoD_v2": [pointer, handle, size],
            "cuMemcpyDtoH_v2": [handle, pointer, size],
            "cuMemsetD8_v2": [pointer, ctypes.c_ubyte, size],
            "cuMemAllocHost_v2": [handle, size],
            "cuMemFreeHost": [handle],
            "cuGetErrorString": [integer, handle],
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, integer
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise OutOfBudget(f"the GPU has no room ({name}): end what else uses it, or compile for a smaller budget")
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeUnavailable(f"the CUDA driver failed in {name}: {(text.value or b'').decode() or 'error'} ({code})")

    def _number(self, name: str) -> int:
        found = ctypes.c_int()
        self._call(name, ctypes.byref(found))
        return found.value

    def version(self) -> str:
        """The newest CUDA that the driver runs."""
        number = self._number("cuDriverGetVersion")
        return f"{number // 1000}.{number % 1000 // 10}"

    def devices(self) -> int:
        """Number of devices."""
        return self._number("cuDeviceGetCount")

    def name(self, device: int) -> str:
        """Name of a device."""
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, 128, device)
        return text.value.decode()

    def use(self, device: int) -> None:
        """Let the calls of this thread that follow be for a device."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])

    def memory(self, device: int) -> tuple[int, int]:
        """Free bytes of a device, and all that it has; those in use may be another process's."""
        self.use(device)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, device: int, size: int) -> int:
        """Address of new memory."""
        self.use(device)
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(1, size))
        return address.value

    def free(self, address: int) -> None:
        """Give memory back."""
        self._call("cuMemFree_v2", address)

    def write(self, address: int, array: Array) -> None:
        """Copy an array (C-contiguous) to the device, and wait: the runtime's streams do not wait for copies by themselves."""
        if array.nbytes:
            self._call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)
            self.synchronize()

    def read(self, array: Array, address: int) -> None:
        """Fill an array (C-contiguous) from the device."""
        if array.nbytes:
            self._call("cuMemcpyDtoH_v2", array.ctypes.data, address, array.nbytes)

    def zero(self, address: int, size: int) -> None:
        """Set bytes to zero, and wait."""
        if size:
            self._call("cuMemsetD8_v2", address, 0, size)
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for all work of the present device."""
        self._call("cuCtxSynchronize")

    def pinned(self, size: int) -> tuple[Array, int]:
        """Bytes of the host that copies run to by themselves, and their address for :meth:`free_pinned`."""
        address = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(address), size)
        assert address.value is not None
        return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address.value)), address.value

    def free_pinned(self, address: int) -> None:
        """Give them back."""
        self._call("cuMemFreeHost", address)


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A tensor in device memory; it can be bound to a session like an array of the host.

    Attributes:
        address: of its first byte.
        shape: its shape.
        dtype: its element type.
        device: number of the device.
        kind: of device, as the bindings call it.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int = 0
    kind: str = "cuda"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def slice(self, start: int, stop: int) -> DeviceArray:
        """Elements ``start`` to ``stop`` of the flattened tensor."""
        stop = min(stop, self.size)
        return DeviceArray(self.address + start * self.dtype.itemsize, (stop - start,), self.dtype, self.device, self.kind)


class Slab:
    """Device memory for arrays that stay: one block of exactly their bytes, each rounded up to the device's alignment.

    Args:
        driver: the driver.
        device: number of the device.
        arrays: name -> array of the host, whose content the one of the device begins with.
    """

    def __init__(self, driver: Driver, device: int, arrays: Mapping[str, Array]) -> None:
        self._driver, self._device = driver, device
        offsets, end = {}, 0
        for name, array in arrays.items():
            offsets[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end
        self._address = driver.allocate(device, end)
        self.arrays = {n: DeviceArray(self._address + offsets[n], a.shape, a.dtype, device) for n, a in arrays.items()}
        for name, array in arrays.items():
            self.write(name, array)

    def write(self, name: str, array: Array) -> None:
        """Copy an array of the host to the device."""
        self._driver.use(self._device)
        self._driver.write(self.arrays[name].address, np.ascontiguousarray(array))

    def read_into(self, name: str, array: Array) -> None:
        """Copy a tensor of the device into an array of the host."""
        self._driver.use(self._device)
        self._driver.read(array, self.arrays[name].address)

    def zero(self, name: str) -> None:
        """Set a tensor to zero."""
        self._driver.use(self._device)
        self._driver.zero(self.arrays[name].address, self.arrays[name].nbytes)

    def close(self) -> None:
        """Give the memory back; its arrays must not be used any more."""
        if self._address:
            self._driver.use(self._device)
            self._driver.free(self._address)
            self._address = 0


_registered: tuple[int, int] | None = None


def register_arena(capacity: int, cuda: Cuda) -> None:
    """Register an arena of ``capacity`` bytes of the device, in one piece, which all sessions of this process share from now on.

    Raises:
        OnnxRematError: this process has another one already, or the device has no room for it.
    """
    global _registered
    if _registered == (capacity, cuda.device):
        return
    if _registered is not None:
        raise OnnxRematError(
            f"this process has an arena of {_registered[0]} bytes on GPU {_registered[1]} already and can't have another of {capacity}: "
            "start a new process"
        )
    from .arena import arena_settings  # which knows the graph

    ort = onnxruntime()
    info = ort.OrtMemoryInfo("Cuda", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, cuda.device, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator_v2(PROVIDER, info, provider_options(cuda, capacity), ort.OrtArenaCfg(arena_settings(capacity)))
    _registered = (capacity, cuda.device)


def claim(capacity: int, make_bound: Any) -> None:
    """Let an arena of 2 GiB or more take all of its memory in one piece, by asking for a buffer that needs it.

    Args:
        capacity: of the arena.
        make_bound: from the bytes of a model to a bound session on the device.
    """
    from .arena import LARGEST_CHUNK  # which knows the graph

    if capacity <= LARGEST_CHUNK:
        return
    from onnx import TensorProto, helper

    rows = capacity // _ALIGNMENT * _ALIGNMENT // 1024
    block = helper.make_node("ConstantOfShape", ["shape"], ["block"], name="claim")
    graph = helper.make_graph(
        [block, helper.make_node("Shape", ["block"], ["size"], name="size")],
        "claim",
        [],
        [helper.make_tensor_value_info("size", TensorProto.INT64, [2])],
        [helper.make_tensor("shape", TensorProto.INT64, [2], [rows, 256])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    make_bound(model.SerializeToString()).run()


@dataclass
class DeviceMeter:
    """What a process takes of a device, as the driver counts it: peak of what was in use, less what was before.

    The runtime gives nothing back between steps, so what is in use after a step is the most that it held.  Libraries that load kernels during
    the first step count, and so does another process that takes memory meanwhile.
    """

    driver: Driver
    device: int
    base: int = 0
    grown: int = 0

    def __post_init__(self) -> None:
        self.base = self.in_use()

    def in_use(self) -> int:
        """Bytes in use now."""
        free, total = self.driver.memory(self.device)
        return total - free

    def before_step(self) -> None:
        """Nothing to be done."""

    def after_step(self) -> None:
        """Look."""
        self.driver.synchronize()
        self.grown = max(self.grown, self.in_use() - self.base)


#: Bytes of the copies that a bandwidth is measured with.
_MEASURED_BYTES = 256 * 2**20


def measured_bandwidth(cuda: Cuda, repeats: int = 5) -> tuple[float, float]:
    """Bytes per second from the device to pinned memory and back: of each the median of some copies."""
    import statistics
    import time

    driver = require_cuda(cuda)
    memory = driver.allocate(cuda.device, _MEASURED_BYTES)
    host, address = driver.pinned(_MEASURED_BYTES)
    try:
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats + 1):
            for found, outward in zip(rates, (True, False), strict=True):
                begin = time.perf_counter()
                driver.read(host, memory) if outward else driver.write(memory, host)
                found.append(_MEASURED_BYTES / (time.perf_counter() - begin))
        return statistics.median(rates[0][1:]), statistics.median(rates[1][1:])
    finally:
        driver.free_pinned(address)
        driver.free(memory)
