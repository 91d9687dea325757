"""The GPUs of this machine: those that the plugin registers with ggml, and the data of the driver."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from .. import errors, system

_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU
_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_...


class Gpu(NamedTuple):
    """A GPU that the plugin uses."""

    name: str  # of the device, such as MACKO0
    description: str
    free: int  # bytes
    total: int


def gpus() -> list[Gpu]:
    """The plugin's GPUs. Raises MackoError if the plugin cannot be registered."""
    from .llama_hook import register

    register()
    ggml, base = system.ggml_library("ggml"), system.ggml_library("ggml-base")
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for function in (base.ggml_backend_dev_name, base.ggml_backend_dev_description):
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p]
    base.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    size_p = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size_p, size_p]
    base.ggml_backend_dev_memory.restype = None
    found = []
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        name = base.ggml_backend_dev_name(device).decode()
        if name.startswith("MACKO") and base.ggml_backend_dev_type(device) == _GPU:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            found.append(Gpu(name, base.ggml_backend_dev_description(device).decode(), free.value, total.value))
    return found


def shared_nbytes(number: int) -> int:
    """Bytes of shared memory that a block may use on a GPU of this machine. Raises MackoError if the GPU is missing."""
    driver, count, device, nbytes = system.cuda_driver(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver and driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    if driver is None or number >= count.value:
        found = f"{count.value} GPU{'s'[: count.value != 1]}" if count.value else "no GPU"
        raise errors.bad_argument(f"device 'cuda:{number}': the driver finds {found}; cuda:sm_90 needs none")
    status = driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetAttribute(
        ctypes.byref(nbytes), _SHARED_MEMORY_PER_BLOCK_OPTIN, device
    )
    if status:
        raise errors.bad_argument(f"device 'cuda:{number}': the driver reports error {status}")
    return nbytes.value
