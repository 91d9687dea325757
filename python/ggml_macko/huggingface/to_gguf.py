"""Converts a Hugging Face checkpoint to a dense GGUF with llama.cpp's converter, if it is installed.

The converter is convert_hf_to_gguf.py of a llama.cpp tree; it needs PyTorch and transformers. GGML_MACKO_CONVERT_HF
names it. Otherwise, it is searched on the PATH, also under the name llama-convert-hf-to-gguf.

The converter loads tokenizers with trust_remote_code, and would run code that the JSON files of a folder name
(auto_map). This module refuses such a folder unless the user permits it. The converter must not download anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import console, errors
from ..gguf.outputs import scratch_folder
from ..regular_files import permissions
from .decompress import PICKLES, check_files, decompress, has_packed_weights, parse_json, read_config, shard_paths

VARIABLE = "GGML_MACKO_CONVERT_HF"
NAMES = ("convert_hf_to_gguf.py", "llama-convert-hf-to-gguf")
NEEDED = ("torch", "transformers", "sentencepiece")
"""Packages that only the converter needs."""

OUTTYPES = ("auto", "f32", "f16", "bf16")


def find_converter(folder: Path) -> list[str]:
    """The command of llama.cpp's converter. Raises MackoError (IO) with a remedy if there is none."""
    named = os.environ.get(VARIABLE)
    if named and not Path(named).is_file():
        raise errors.error(errors.IO, f"{VARIABLE}={named}: there is no such file")
    found = named or next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        raise errors.error(
            errors.IO,
            f"{folder}: a Hugging Face checkpoint needs {NAMES[0]} of llama.cpp to become a GGUF, and it is not on the "
            f"PATH; {VARIABLE}=FILE names it; llama-cpp-python's source distribution contains it "
            "(docs/guide/huggingface.md)",
        )
    return [_python(), found] if found.endswith(".py") else [found]


def _python() -> str:
    """The first Python with the packages in NEEDED: this one or one on the PATH. This one if none has them."""
    others = [path for path in map(shutil.which, ("python3", "python")) if path]
    return next((path for path in (sys.executable, *others) if not _lacking(path)), sys.executable)


def _lacking(python: str) -> list[str]:
    """The packages in NEEDED that a Python lacks."""
    script = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None])"
    done = subprocess.run([python, "-c", script, *NEEDED], capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else list(NEEDED)


def check_runs_no_code(folder: Path) -> None:
    """Raises MackoError if a JSON file of a checkpoint names Python code that transformers would run."""
    for path in sorted(folder.glob("*.json")):
        if _names_code(parse_json(path)):
            raise errors.bad_argument(
                f"{path}: has auto_map: the converter would run Python code of this checkpoint, or of another "
                "repository; look at it first, then use --trust-remote-code"
            )


def _names_code(value: object) -> bool:
    """Whether there is a key auto_map anywhere."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if "auto_map" in item:
                return True
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return False


def _convert(checkpoint: Path, folder: Path, output: Path, outtype: str) -> None:
    """Writes a dense GGUF of a checkpoint whose weights are dense.

    folder: the files of the checkpoint that the converter reads. output: a file that may be overwritten. outtype: f32,
    f16, bf16, or auto, which the converter takes from the weights. Raises MackoError with the last line that the
    converter printed if it fails.
    """
    command = [*find_converter(checkpoint), os.fspath(folder), "--outfile", os.fspath(output), "--outtype", outtype]
    console.log(f"{checkpoint.name}: {Path(command[-6]).name} makes a GGUF ..")
    is_seen = console.shows_progress()  # the converter then shows progress and errors itself
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL if is_seen else subprocess.PIPE,
        stderr=None if is_seen else subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        text=True,
        errors="replace",
    )
    if done.returncode != 0 or not output.is_file():
        lines = [line.strip() for line in (done.stdout or "").splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {done.returncode}"
        missing = _lacking(command[0]) if len(command) == 7 else []  # otherwise, its Python is unknown
        hint = f" ({command[0]} lacks {', '.join(missing)})" if missing else ""
        raise errors.error(errors.LOAD_FAILED, f"{checkpoint}: {Path(command[-6]).name}: {last[:500]}{hint}")


@contextlib.contextmanager
def as_gguf(
    source: str | os.PathLike[str],
    near: str | os.PathLike[str] | None,
    outtype: str = "auto",
    trust_remote_code: bool = False,
) -> Iterator[Path]:
    """The GGUF of a source: the source itself, or a temporary file if the source is a folder with a checkpoint.

    near: the output; temporary files are written to its folder. None: the system's temporary folder. Weights of
    compressed-tensors are decompressed first. trust_remote_code: the checkpoint may name Python code, which the
    converter then runs.
    Raises MackoError or OSError; nothing is left behind.
    """
    path = Path(source)
    if not path.is_dir():
        yield path
        return
    read_config(path)
    check_files(path)
    find_converter(path)  # before anything is written
    parent = tempfile.gettempdir() if near is None else Path(os.path.realpath(near)).parent
    if not os.path.isdir(parent):
        raise errors.error(errors.IO, f"{parent}: is not a folder")
    if not trust_remote_code:
        check_runs_no_code(path)
    with scratch_folder(parent, ".macko-hf-") as folder:
        dense = folder / path.resolve().name
        if has_packed_weights(path):
            decompress(path, dense)
        else:
            _link(path, dense, trust_remote_code)
        gguf = folder / "model.gguf"
        _convert(path, dense, gguf, outtype)
        shutil.rmtree(dense)  # frees disk space for the next step
        gguf.chmod(gguf.stat().st_mode & permissions(shard_paths(path)))
        yield gguf


def _link(checkpoint: Path, folder: Path, trust_remote_code: bool) -> None:
    """Makes a folder with links to the files that the converter may open: no pickles, nor code that is not trusted."""
    hidden = [".*", *(f"*{suffix}" for suffix in PICKLES), *([] if trust_remote_code else ["*.py"])]
    shutil.copytree(
        checkpoint,
        folder,
        ignore=shutil.ignore_patterns(*hidden),
        copy_function=lambda source, link: os.symlink(os.path.realpath(source), link),
    )
