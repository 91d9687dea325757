#!/usr/bin/env python3
"""Shows what a GGUF holds: the same as `macko inspect`; see --help."""

import sys

from ggml_macko.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["inspect", *sys.argv[1:]]))
