"""Inputs that each command that evaluates a text must refuse, with the error messages."""

from __future__ import annotations

from pathlib import Path

from support import generators

SAMPLE = generators.SAMPLE


def one_line(done, *parts, code=1):
    """Asserts that a subcommand failed with one line that contains the parts."""
    assert done.code == code and "Traceback" not in done.err
    last = done.err.strip().splitlines()
    assert last[-1].startswith("error: ") and len(last) == 1, done.err
    for part in parts:
        assert str(part) in last[-1], last[-1]


FILES = ["empty.txt", "latin.txt", "short.txt", "torn.gguf"]  # the files that texts_and_models writes


def texts_and_models(folder: Path) -> list:
    """Writes the files; returns pairs (arguments, parts of the message)."""
    model = generators.DEMO
    empty, short, latin, torn = (folder / name for name in ("empty.txt", "short.txt", "latin.txt", "torn.gguf"))
    missing = folder / "missing"
    empty.write_text("")
    short.write_text("The function returns a value. " * 30)
    latin.write_bytes(SAMPLE.read_bytes() + b"caf\xe9\xff\xfe")  # some tokenizers of llama.cpp abort on such bytes
    torn.write_bytes(model.read_bytes()[:-1000])
    return [
        (["-m", model, "-f", empty], [empty, "is empty"]),
        (["-m", model, "-f", short], [short, "tokens; at least 1024 are needed", "-c"]),
        (["-m", model, "-f", latin], [latin, f"is not UTF-8 text: byte {len(SAMPLE.read_bytes()) + 3} is 0xe9"]),
        (["-m", model, "-f", missing], [missing, "No such file"]),
        (["-m", model, "-f", folder], [folder, "is a directory, not a regular file"]),
        (["-m", missing, "-f", SAMPLE], [missing, "No such file"]),
        (["-m", SAMPLE, "-f", SAMPLE], [SAMPLE, "GGUF"]),
        (["-m", torn, "-f", SAMPLE], [torn]),
    ]
