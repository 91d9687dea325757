"""The functions of this package under one name."""

from __future__ import annotations

from .codec import (
    Codec,
    Count,
    DeviceLayout,
    EncodedMatrix,
    MatrixHeader,
    codecs,
    count_dense,
    cpu_layout,
    decode,
    drop_negative_zeros,
    encode,
    gpu_layout,
    gpu_nbytes,
    measure_error,
    quantize_q4_nl,
    round_to_scales,
    validate,
)
from .cpu import CpuMatrix, cpu_kernels
from .environment import ENABLE, LOAD, Setting, check_environment, is_enabled, settings, with_words
from .file import WEIGHT_BLOCK, WEIGHT_HEAD, WEIGHT_OTHER, File, FileSparse, FileTensor, weight_use
from .library import (
    LIBRARY_PATH,
    PRELOAD_PATH,
    check_ggml,
    check_running_ggml,
    ggml_range,
    gpus,
    llama_cpp_python_range,
    running_ggml,
    status_name,
    version,
)
from .load_model import LlamaFunctions, LoadOptions, load_model

__all__ = [
    "ENABLE", "LIBRARY_PATH", "LOAD", "PRELOAD_PATH", "WEIGHT_BLOCK", "WEIGHT_HEAD", "WEIGHT_OTHER", "Codec",
    "Count", "CpuMatrix", "DeviceLayout", "EncodedMatrix", "File", "FileSparse", "FileTensor", "LlamaFunctions",
    "LoadOptions", "MatrixHeader", "Setting", "check_environment", "check_ggml", "check_running_ggml", "codecs",
    "count_dense", "cpu_kernels", "cpu_layout", "decode", "drop_negative_zeros", "encode", "ggml_range",
    "gpu_layout", "gpu_nbytes", "gpus", "is_enabled", "llama_cpp_python_range", "load_model", "measure_error",
    "quantize_q4_nl", "round_to_scales", "running_ggml", "settings", "status_name", "validate", "version",
    "weight_use", "with_words",
]  # fmt: skip
