#!/usr/bin/env python3
"""Sets weights of a dense GGUF to zero: the same as `macko prune`; see --help."""

import sys

from ggml_macko.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["prune", *sys.argv[1:]]))
