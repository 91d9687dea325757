#!/usr/bin/env python3
"""Turns a sparse GGUF back into a dense one: the same as `macko restore`; see --help."""

import sys

from ggml_macko.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["restore", *sys.argv[1:]]))
