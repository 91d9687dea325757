"""Unpacks the headers of llama.cpp and of its xxHash from a llama-cpp-python source distribution: VERSION OUT_DIR.

pip downloads the archive, or takes it from its cache. Only the headers, ggml's CMakeLists.txt (for the version number)
and the licenses are kept.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

WANTED = re.compile(
    r"[^/]+/vendor/llama\.cpp/((?:include|ggml/include|ggml/src)/[^/]+\.h|vendor/hash/xxhash/(?:xxhash\.h|LICENSE)"
    r"|ggml/CMakeLists\.txt|LICENSE)$"
)


def main(version: str, out_dir: str) -> None:
    out = pathlib.Path(out_dir)
    with tempfile.TemporaryDirectory() as tmp:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*download, "-d", tmp, f"llama-cpp-python=={version}"], check=True, stdout=sys.stderr)
        (archive,) = pathlib.Path(tmp).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                match = WANTED.match(member.name)
                if match and member.isfile():
                    target = out / match.group(1)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(tar.extractfile(member).read())


if __name__ == "__main__":
    main(*sys.argv[1:])
