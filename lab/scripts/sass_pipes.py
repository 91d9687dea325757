#!/usr/bin/env python3
"""Counts the instructions of a GPU kernel's inner loop by pipe (lab/quantized.md). Needs the CUDA toolkit's cuobjdump.

  nvcc -std=c++17 -O3 --expt-relaxed-constexpr -arch=sm_86 -cubin -I ggml-macko/src -I ggml-macko/include \\
      ggml-macko/src/cuda/sparse/fragments.cu -o fragments.cubin
  python3 lab/scripts/sass_pipes.py fragments.cubin fragments_kernelILi4ELi1E [--per N]

The inner loop is the smallest one with tensor-core products; --per divides its counts by the number of steps in it (8
for the layout FRAGMENTS). Clocks are those of a quarter of a multiprocessor, which issues one instruction per clock; an
instruction of 32 lanes takes two on 16 lanes.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess

# Pipes of compute capabilities 8.6 to 12.0. All other instructions (branches, barriers, uniform registers) take only an
# issue slot.
PIPES = {
    "ALU": "PRMT LOP3 SHF IADD3 IADD ISETP SEL LEA MOV VIADD IMNMX VIMNMX SGXT BMSK PLOP3 FSETP FSEL FMNMX I2FP VOTE "
    "P2R R2P LOP IABS",
    "FMA heavy": "IMAD IDP",
    "FMA": "FFMA FADD FMUL HFMA2 HADD2 HMUL2",
    "LSU": "LDS STS LDG STG LDGSTS LDSM SHFL ATOMS RED LDL STL",
    "XU": "I2F F2I MUFU POPC FLO BREV I2I",
    "tensor": "IMMA HMMA",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}


def functions(cubin: str) -> dict[str, list[tuple[int, str]]]:
    """The instructions (address, text) of each kernel."""
    sass = subprocess.run(["cuobjdump", "-sass", cubin], check=True, capture_output=True, text=True).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    for line in sass.splitlines():
        if match := re.search(r"Function : (.*)", line):
            body = found.setdefault(match[1], [])
        elif match := re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", line):
            body.append((int(match[1], 16), match[2]))
    return found


def inner_loop(body: list[tuple[int, str]]) -> list[str]:
    """The instructions from the target of a backward branch to the branch, for the smallest loop with products."""
    loops = []
    for at, text in body:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text.strip())
        if target and int(target[1], 16) < at:
            loop = [t for a, t in body if int(target[1], 16) <= a <= at]
            if any("MMA" in t for t in loop):
                loops.append(loop)
    return min(loops, key=len)


def opcode(text: str) -> str:
    return re.sub(r"^@!?U?P\w+ ", "", text.strip()).split()[0].split(".")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin")
    parser.add_argument("kernel", help="part of its mangled name")
    parser.add_argument("--per", type=int, default=8, help="steps in the loop")
    options = parser.parse_args()
    bodies = {name: body for name, body in functions(options.cubin).items() if options.kernel in name}
    for name, body in bodies.items():
        codes = collections.Counter(opcode(text) for text in inner_loop(body))
        pipes: collections.Counter[str] = collections.Counter()
        for code, n in codes.items():
            pipes[PIPE_OF.get(code, "issue only")] += n
        print(name, f"{codes.total() / options.per:.2f} issued", sep="\n  ")
        for counts in (pipes, codes):
            print("  ", ", ".join(f"{code} {n / options.per:.2f}" for code, n in counts.most_common()))


if __name__ == "__main__":
    main()
