"""Writes ggml_macko/_ffi.py from the declarations beside this file (cffi, ABI mode out of line: no compiler at install
time).

    python build_ffi.py OUT_DIR

The declarations repeat ggml-macko/include/ggml-macko.h; tests/unit/test_cffi_declarations.py compiles them against it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

# in this order: later files use types of earlier ones
DECLARATIONS = ["library.h", "codec.h", "cpu.h", "file.h", "load.h"]


def declarations() -> str:
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in DECLARATIONS)


def build(out_dir: Path) -> Path:
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    ffi.set_source("ggml_macko._ffi", None)
    path = out_dir / "_ffi.py"
    ffi.emit_python_code(str(path))
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: build_ffi.py OUT_DIR")
    print(build(Path(sys.argv[1])))
