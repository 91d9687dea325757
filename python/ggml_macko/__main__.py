"""`python -m ggml_macko`: the `macko` command."""

from __future__ import annotations

import sys

from .commands.cli import main

sys.exit(main())
