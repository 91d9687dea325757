#!/usr/bin/env python3
"""Compares two GGUFs bit for bit: the same as `macko verify`; see --help."""

import sys

from ggml_macko.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
