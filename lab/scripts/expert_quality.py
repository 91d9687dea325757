#!/usr/bin/env python3
"""Perplexity of a mixture without some of its experts, chosen by each score, as one table.

lab/scripts/expert_quality.py mixture.gguf -f calibration.txt --held-out held-out.txt
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from typing import Any

from ggml_macko import console
from ggml_macko.evaluation.perplexity import perplexity
from ggml_macko.pruning.options import PruneOptions
from ggml_macko.pruning.prune import prune


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="mixture of experts")
    parser.add_argument("-f", "--file", required=True, help="calibration text")
    parser.add_argument("--held-out", required=True, help="text to measure perplexity on")
    parser.add_argument("-c", "--ctx-size", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=128, help="chunks of the calibration text (default: %(default)s)")
    parser.add_argument("--held-out-chunks", type=int, default=64, help="chunks to measure (default: %(default)s)")
    parser.add_argument("--experts", default="0.25,0.5", help="shares to remove (default: %(default)s)")
    parser.add_argument("--sparsity", help="also make zeros in the remaining experts, by Wanda")
    parser.add_argument("--seeds", type=int, default=5, help="number of random choices (default: %(default)s)")
    args = parser.parse_args()
    shares = args.experts.split(",")
    zeros: dict[str, Any] = {} if args.sparsity is None else {"sparsity": args.sparsity, "method": "wanda"}

    def measure(path: str | pathlib.Path) -> str:
        found = perplexity(path, args.held_out, n_ctx=args.ctx_size, n_chunks=args.held_out_chunks, evenly=True)
        return f"{found.ppl:.2f} ± {found.error:.2f}"

    with tempfile.TemporaryDirectory() as folder, console.quiet():
        path = pathlib.Path(folder) / "fewer.gguf"
        rows = [["all experts", measure(args.model), *[""] * (len(shares) - 1)]]
        choices = [("reap", 0), ("frequency", 0), *(("random", seed) for seed in range(args.seeds))]
        for score, seed in choices:
            row = [f"random, seed {seed}" if score == "random" else score]
            for share in shares:
                options = PruneOptions(
                    experts=share,
                    expert_score=score,
                    seed=seed,
                    text=args.file,
                    n_ctx=args.ctx_size,
                    n_chunks=args.chunks,
                    **zeros,
                )
                prune(args.model, path, options, force=True)
                row.append(measure(path))
            rows.append(row)
    print(console.table(rows, ["experts removed by", *(f"{float(share):.0%}" for share in shares)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
