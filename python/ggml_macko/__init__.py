"""Sparse LLM weights for stock llama.cpp: codecs, CPU and GPU kernels, GGUF tools and a drop-in `Llama`.

    from ggml_macko import Llama, convert

    convert("pruned.gguf", "sparse.gguf")
    llama = Llama("sparse.gguf")

`Llama` opens sparse models; `plan`, `prune`, `recover`, `convert`, `restore`, `verify`, `inspect`, `calibrate`,
`perplexity` and `kl_divergence` are the subcommands of `macko` as functions; `SparseMatrix` is one matrix on NumPy
arrays.

Importing the package is cheap: the C library and llama_cpp are loaded with the first name that needs them.
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

_HOME = {
    "Llama": "llama",
    "register": "native.llama_hook",
    "SparseMatrix": "sparse_matrix",
    "plan": "conversion.estimate",
    "ModelPlan": "conversion.estimate",
    "convert": "conversion.convert",
    "ConversionReport": "conversion.convert",
    "ConvertOptions": "conversion.convert",
    "restore": "conversion.restore",
    "RestorationReport": "conversion.restore",
    "verify": "conversion.verify",
    "Verification": "conversion.verify",
    "inspect": "conversion.inspect",
    "ModelReport": "conversion.inspect",
    "prune": "pruning.prune",
    "PruneReport": "pruning.prune",
    "PruneOptions": "pruning.options",
    "recover": "recovery.recover",
    "RecoverReport": "recovery.recover",
    "RecoverOptions": "recovery.options",
    "decompress": "huggingface.decompress",
    "Decompression": "huggingface.decompress",
    "calibrate": "evaluation.calibrate",
    "Calibration": "evaluation.calibrate",
    "calibrate_activations": "evaluation.calibrate_activations",
    "ActivationCalibration": "evaluation.calibrate_activations",
    "SkipOptions": "evaluation.skipping",
    "perplexity": "evaluation.perplexity",
    "Estimate": "evaluation.likelihood",
    "skipped_perplexity": "evaluation.perplexity",
    "SkippedPerplexity": "evaluation.perplexity",
    "kl_divergence": "evaluation.perplexity",
    "Divergence": "evaluation.kl_divergence",
    "MackoError": "errors",
    "FileFormatError": "errors",
    "VersionMismatchError": "errors",
}
"""The module of each public name."""

__all__ = [
    "ActivationCalibration",
    "Calibration",
    "ConversionReport",
    "ConvertOptions",
    "Decompression",
    "Divergence",
    "Estimate",
    "FileFormatError",
    "Llama",
    "MackoError",
    "ModelPlan",
    "ModelReport",
    "PruneOptions",
    "PruneReport",
    "RecoverOptions",
    "RecoverReport",
    "RestorationReport",
    "SkipOptions",
    "SkippedPerplexity",
    "SparseMatrix",
    "Verification",
    "VersionMismatchError",
    "calibrate",
    "calibrate_activations",
    "convert",
    "decompress",
    "inspect",
    "kl_divergence",
    "perplexity",
    "plan",
    "prune",
    "recover",
    "register",
    "restore",
    "skipped_perplexity",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "__version__":  # one place for the number: the C library's
        from .native import bindings

        return bindings.version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
