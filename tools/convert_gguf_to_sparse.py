#!/usr/bin/env python3
"""Converts a pruned GGUF to a sparse file, like `macko convert`; see --help."""

import sys

from ggml_macko.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
