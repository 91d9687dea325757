"""Writes ggml_macko/_ffi.py, cffi's view of ggml-macko.h (ABI mode out of line: no compiler at install time).

python build_ffi.py OUT_DIR
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi

HEADER = Path(__file__).resolve().parent.parent / "ggml-macko" / "include" / "ggml-macko.h"


def declarations(header: str) -> str:
    """The declarations and integer macros of the header, without the other lines for the preprocessor."""
    text = re.sub(r"^#(?!define \w+ +\d+$).*\n", "", header, flags=re.MULTILINE)
    return text.replace("GGML_MACKO_API ", "")


def build(out_dir: Path) -> Path:
    ffi = cffi.FFI()
    ffi.cdef(declarations(HEADER.read_text(encoding="utf-8")))
    ffi.set_source("ggml_macko._ffi", None)
    path = out_dir / "_ffi.py"
    ffi.emit_python_code(str(path))
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: build_ffi.py OUT_DIR")
    print(build(Path(sys.argv[1])))
