"""Files of a repository on the Hugging Face hub: `-hf REPO[:FILE]`.

huggingface-hub downloads and caches them; it is optional (the extra `huggingface`) and imported only here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import errors

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_CHECKPOINT = (".safetensors", ".json", ".model", ".txt", ".jinja")  # files of a repository that a converter needs


def download(spec: str) -> Path:
    """The local path of `REPO[:FILE]`: a GGUF, the first shard of a split one, or the folder of a checkpoint.

    REPO: user/name. FILE: a file of it, or a part of the name of one GGUF, such as Q8_0. FILE is optional if the
    repository has only one GGUF, or no GGUF but safetensors. Raises MackoError.
    """
    repo, _, wanted = spec.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise errors.bad_argument(f"-hf {spec}: expected USER/NAME or USER/NAME:FILE")
    hub = _hub()
    try:
        names = sorted(hub.list_repo_files(repo))
        chosen = choose(repo, names, wanted)
        paths = [Path(hub.hf_hub_download(repo, name)) for name in chosen]
    except errors.MackoError:
        raise
    except Exception as e:  # of the network, the hub, the disk
        raise errors.error(errors.IO, f"-hf {repo}: {errors.one_line(e)[:500]}") from e
    return paths[0] if paths[0].suffix == ".gguf" else paths[0].parent


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise errors.bad_argument("-hf needs huggingface-hub: pip install 'ggml-macko[huggingface]'") from None
    return huggingface_hub


def choose(repo: str, names: Sequence[str], wanted: str) -> list[str]:
    """The files to download; the first one represents all. names: all files of the repository, sorted."""
    models = [name for name in names if name.endswith(".gguf") and not _is_later_part(name)]
    top = [name for name in names if "/" not in name and name.endswith(_CHECKPOINT)]
    if wanted in names:
        found = [wanted]
    elif wanted:
        found = [name for name in models if wanted.lower() in name.lower()]
    elif not models and any(name.endswith(".safetensors") for name in top):
        return sorted(top, key=lambda name: name != "config.json")
    else:
        found = models
    if len(found) != 1:
        what = f"{len(found)} files match" if found else "no file matches" if wanted else "there is no GGUF"
        known = ", ".join(models[:20]) or ", ".join(names[:20])
        raise errors.bad_argument(f"-hf {repo}:{wanted}: {what}; there are: {known}")
    split = _SPLIT.fullmatch(found[0])
    if split is None:
        return found
    parts = [f"{split[1]}-{i + 1:05d}-of-{split[3]}.gguf" for i in range(max(1, min(int(split[3]), len(names) + 1)))]
    missing = [name for name in parts if name not in names]
    if missing:
        raise errors.bad_argument(f"-hf {repo}:{wanted}: {missing[0]} is not there")
    return parts


def _is_later_part(name: str) -> bool:
    split = _SPLIT.fullmatch(name)
    return split is not None and int(split[2]) != 1
