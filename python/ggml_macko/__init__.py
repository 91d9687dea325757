"""Sparse LLM weights for stock llama.cpp: codecs, CPU and GPU kernels, GGUF tools and a drop-in `Llama`.

    from ggml_macko import Llama, convert

    convert("pruned.gguf", "sparse.gguf")
    llama = Llama("sparse.gguf")

`Llama` opens sparse models. `plan`, `prune`, `recover`, `convert`, `restore`, `verify`, `inspect`, `calibrate`,
`perplexity` and `kl_divergence` are the subcommands of `macko` as functions. `SparseMatrix` holds one matrix.

Importing the package is fast: the first name that needs the C library and llama_cpp loads them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conversion.convert import ConversionReport, ConvertOptions, convert
    from .conversion.estimate import ModelPlan, plan
    from .conversion.inspect import ModelReport, inspect
    from .conversion.restore import RestorationReport, restore
    from .conversion.verify import Verification, verify
    from .errors import FileFormatError, MackoError, VersionMismatchError
    from .evaluation.calibrate import Calibration, calibrate
    from .evaluation.calibrate_activations import ActivationCalibration, calibrate_activations
    from .evaluation.kl_divergence import Divergence
    from .evaluation.likelihood import Estimate
    from .evaluation.perplexity import SkippedPerplexity, kl_divergence, perplexity, skipped_perplexity
    from .evaluation.skipping import SkipOptions
    from .huggingface.decompress import Decompression, decompress
    from .llama import Llama
    from .native.llama_hook import register
    from .pruning.options import PruneOptions
    from .pruning.prune import PruneReport, prune
    from .recovery.options import RecoverOptions
    from .recovery.recover import RecoverReport, recover
    from .sparse_matrix import SparseMatrix

_MODULES = {
    "llama": "Llama",
    "native.llama_hook": "register",
    "sparse_matrix": "SparseMatrix",
    "conversion.estimate": "plan ModelPlan",
    "conversion.convert": "convert ConversionReport ConvertOptions",
    "conversion.restore": "restore RestorationReport",
    "conversion.verify": "verify Verification",
    "conversion.inspect": "inspect ModelReport",
    "pruning.prune": "prune PruneReport",
    "pruning.options": "PruneOptions",
    "recovery.recover": "recover RecoverReport",
    "recovery.options": "RecoverOptions",
    "huggingface.decompress": "decompress Decompression",
    "evaluation.calibrate": "calibrate Calibration",
    "evaluation.calibrate_activations": "calibrate_activations ActivationCalibration",
    "evaluation.skipping": "SkipOptions",
    "evaluation.perplexity": "perplexity skipped_perplexity SkippedPerplexity kl_divergence",
    "evaluation.likelihood": "Estimate",
    "evaluation.kl_divergence": "Divergence",
    "errors": "MackoError FileFormatError VersionMismatchError",
}
"""Module -> its public names."""

_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "ActivationCalibration", "Calibration", "ConversionReport", "ConvertOptions", "Decompression", "Divergence",
    "Estimate", "FileFormatError", "Llama", "MackoError", "ModelPlan", "ModelReport", "PruneOptions", "PruneReport",
    "RecoverOptions", "RecoverReport", "RestorationReport", "SkipOptions", "SkippedPerplexity", "SparseMatrix",
    "Verification", "VersionMismatchError", "calibrate", "calibrate_activations", "convert", "decompress", "inspect",
    "kl_divergence", "perplexity", "plan", "prune", "recover", "register", "restore", "skipped_perplexity", "verify",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "__version__":  # the C library has the number
        from .native import library

        return library.version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
