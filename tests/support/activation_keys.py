"""The keys macko.act.* of a model file, and bad values of them with the messages."""

from __future__ import annotations

from support import gguf_bytes as gb

HOSTILE = {
    "kind": ("act.kind", gb.STRING, b"rows", "macko.act.kind is 'rows' (one of cats, product, wina)"),
    "control characters": ("act.kind", gb.STRING, b"\x1b[2J\n", "macko.act.kind is '\\x1b[2J\\x0a' (one of"),
    "kind of another type": ("act.kind", gb.U32, 1, "macko.act.kind has the wrong type"),
    "allocation": ("act.allocation", gb.STRING, b"best", "macko.act.allocation is 'best' (one of uniform, greedy)"),
    "share": ("act.share", gb.F32, 1.5, "macko.act.share: element 0 is 1.5 (0 ... 1)"),
    "share is NaN": ("act.share", gb.F32, float("nan"), "macko.act.share: element 0 is nan (0 ... 1)"),
    "chunks": ("act.chunks", gb.U32, 0, "macko.act.chunks is 0 (at least 1)"),
    "n_ctx": ("act.n_ctx", gb.U32, 0, "macko.act.n_ctx is 0 (at least 1)"),
    "no text": ("act.text", gb.STRING, b"", "macko.act.text has 0 bytes (a file's name: 1 ... 1024)"),
    "version": ("act.version", gb.U32, 0, "macko.act.version is 0 (at least 1)"),
    "unknown": ("act.scale", gb.F32, 1.0, "macko.act.scale is reserved"),
    "shares of parts": ("act.part.share", gb.F32, [0.5, -0.1, 0.5, 0.5], "part.share: element 1 is -0.1 (0 ... 1)"),
    "thresholds": ("act.part.threshold", gb.F32, [1, 1, 1, float("inf")], "threshold: element 3 is inf (0 ... 3.4"),
    "too few": ("act.part.threshold", gb.F32, [1, 1, 1], "threshold has 3 elements (1 ... 65536, as many as"),
    "none": ("act.part.down", gb.STRING, [], "macko.act.part.down has 0 elements (1 ... 65536"),
    "twice": ("act.part.down", gb.STRING, [b"a", b"b", b"a", b"c"], "macko.act.part.down has 'a' twice"),
    "long name": ("act.part.down", gb.STRING, [b"x" * 64, b"b", b"a", b"c"], "element 0 has 64 bytes (a tensor's name"),
}  # fmt: skip


def set_act(file, name, type_, value):
    if isinstance(value, list):
        file.set(f"macko.{name}", gb.ARRAY, value, type_)
    else:
        file.set(f"macko.{name}", type_, value)
