"""The wheel that tools/dev.py builds: its contents, its dependencies, and the demo with it in an environment of its
own, outside of the repository.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from support import generators

FOLDER = generators.ROOT / "build" / "dist"
# system libraries; ggml-base is llama-cpp-python's, OpenMP must be the copy that it uses
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"}
SYSTEM |= {"libgcc_s.so.1", "libstdc++.so.6"}
NEEDED = {
    # the CUDA runtime is inside; driver and cuBLAS are opened at run time if they exist
    "libggml-macko.so": SYSTEM | {"libggml-base.so.0", "libgomp.so.1"},
    "libggml-macko-preload.so": SYSTEM,
}
MAX_NBYTES = {True: 30_000_000, False: 1_000_000}  # with and without CUDA: RELEASE.md


def has_cuda(package: pathlib.Path) -> bool:
    return b".nv_fatbin" in (package / "libggml-macko.so").read_bytes()


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    found = list(FOLDER.glob("*.whl"))
    if not found:
        pytest.skip("no wheel in build/dist: tools/dev.py puts it there")
    return found[0]


def test_wheel_brings_and_needs_only_what_it_should(wheel, tmp_path):
    assert re.fullmatch(r"ggml_macko-[\d.]+-py3-none-(many)?linux\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as z:
        names = {n.split("/", 1)[1] for n in z.namelist() if n.startswith("ggml_macko/")}
        z.extractall(tmp_path)
    assert wheel.stat().st_size < MAX_NBYTES[has_cuda(tmp_path / "ggml_macko")]
    assert {n.split("/")[0].split(".")[0] for n in z.namelist()} <= {"ggml_macko", "ggml_macko-0"}
    expected = "libggml-macko.so libggml-macko-preload.so _ffi.py include/ggml-macko.h py.typed LICENSE-xxHash"
    assert names.issuperset(expected.split())
    assert not [n for n in names if ".so" in n and n not in NEEDED]
    for name in names & set(NEEDED):
        text = subprocess.run(
            ["readelf", "-d", tmp_path / "ggml_macko" / name], check=True, capture_output=True, text=True
        ).stdout
        assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", text)) <= NEEDED[name]
        assert "PATH)" not in text  # no RPATH, RUNPATH: no path of the build machine


@pytest.mark.slow
def test_wheel_in_a_fresh_environment_runs_the_demo(wheel, tmp_path):
    """The dependencies are those of this environment, because llama-cpp-python takes minutes to build."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    site = next((tmp_path / "env" / "lib").glob("python3*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    (tmp_path / "elsewhere").mkdir()

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(c) for c in command], cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    where = run(python, "-c", "import ggml_macko; print(ggml_macko.__file__)").strip()
    assert pathlib.Path(where).parent == site / "ggml_macko" and sys.prefix not in where
    version = run(tmp_path / "env" / "bin" / "macko", "--version")
    assert ("built for CUDA" if has_cuda(site / "ggml_macko") else "built without CUDA") in version
    out = run(python, generators.ROOT / "tools" / "demo.py")
    assert "identical" in out and "| bundled, 70 % zeros | sparse" in out
    assert {p.name for p in (tmp_path / "elsewhere").iterdir()} == {"demo-out"}
