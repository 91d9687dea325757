"""llama_cpp.server with sparse models: `python -m ggml_macko.server --model sparse.gguf`, with llama_cpp.server's
options.
"""

from __future__ import annotations

import sys

from .errors import one_line
from .native.loader import register


def main() -> int:
    try:
        register()
        from llama_cpp.server.__main__ import main as serve

        serve()  # type: ignore[no-untyped-call]  # answers requests that fail itself: what it raises kept it from starting
        return 0
    except ModuleNotFoundError as e:
        text = f"the server needs the package {e.name}: pip install 'ggml-macko[server]'"
    except Exception as e:
        text = one_line(e)
    print(f"error: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
