"""llama_cpp.server with sparse models: `python -m ggml_macko.server --model sparse.gguf`, with llama_cpp.server's
options, and -hf REPO[:FILE] for a GGUF of the Hugging Face hub.
"""

from __future__ import annotations

import sys

import llama_cpp

from . import errors, guards
from .errors import one_line
from .huggingface.hub import download
from .llama import Llama
from .native.llama_hook import register


def with_download(arguments: list[str]) -> list[str]:
    """Replaces -hf REPO[:FILE] by --model and the path of the downloaded file. Raises MackoError."""
    names = ("-hf", "--hf-repo")
    at = next((i for i, argument in enumerate(arguments) if argument in names), None)
    if at is None:
        return arguments
    if at + 1 == len(arguments):
        raise errors.bad_argument(f"{arguments[at]}: expected USER/NAME or USER/NAME:FILE")
    return [*arguments[:at], "--model", str(download(arguments[at + 1])), *arguments[at + 2 :]]


def main() -> int:
    try:
        register()
        sys.argv[1:] = with_download(sys.argv[1:])
        setattr(llama_cpp, "Llama", Llama)  # noqa: B010  its checks hold for all requests
        from llama_cpp.server.__main__ import main as serve

        guards.install("llama_cpp.server")
        # The server answers failed requests itself. It raises an exception only if it cannot start.
        serve()  # type: ignore[no-untyped-call]
        return 0
    except ModuleNotFoundError as e:
        text = f"the server needs the package {e.name}: pip install 'ggml-macko[server]'"
    except Exception as e:
        text = one_line(e)
    print(f"error: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
