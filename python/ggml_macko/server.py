"""llama_cpp.server with sparse models: `python -m ggml_macko.server --model sparse.gguf`. The options are
llama_cpp.server's own.
"""

from __future__ import annotations

from .loader import register


def main() -> None:
    register()
    from llama_cpp.server.__main__ import main as serve

    serve()


if __name__ == "__main__":
    main()
