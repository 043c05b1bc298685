"""A GGUF file as a checkpoint directory: converted once, kept in the user's cache, checked at every start.

<cache>/gguf/demo-3f0c92d41b7e5a88/     one conversion; complete from the moment it has its name
    manifest.json                       what it was made from, by what, and the size of every file
    config.json  model-*.safetensors  tokenizer.json  ...
<cache>/gguf/sources/<hash>.json        check sum of a source file while its size and time stay the same
<cache>/gguf/.partial-*/                conversions under way, or the rest of an interrupted one
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from numpy.typing import NDArray

from forkpoint.configs.errors import ModelLoadError

if TYPE_CHECKING:
    import gguf
    import numpy as np

# Raise it when a conversion would come out different: old directories are then passed over.
CONVERTER_VERSION = 1
# Dequantised values need up to 19 bits, so bfloat16 would round them again and float32 serving would no
# longer equal other readers of the file. Small models are kept exact; from here on, half the disk space
# counts for more.
EXACT_UP_TO_BYTES = 4 * 2**30
_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many units of it are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A file to convert. sha256: its check sum. name: what its directory is called.

    chat_template: the one to use if the file has none. sampling: what its makers sample it with, for
    generation_config.json; a GGUF file does not say.
    """

    sha256: str
    name: str
    chat_template: str | None = None
    sampling: tuple[tuple[str, float], ...] = ()

    def directory(self, cache_dir: Path) -> Path:
        """Where its conversion lies, or will lie; whatever would make it differ means another directory."""
        key = f"{self.sha256} {CONVERTER_VERSION} {self.chat_template or ''}"
        if self.sampling:
            key += f" {self.sampling}"
        return cache_dir / "gguf" / f"{self.name}-{_short_hash(key)}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory was made from, and what must be in it. file_bytes: size of every file by name."""

    source_name: str
    source_sha256: str
    converter_version: int
    file_bytes: dict[str, int]


def find_conversion(source: GgufSource, cache_dir: Path) -> Path | None:
    """The directory of an earlier conversion if it is whole (every file there, with its size), else None."""
    directory = source.directory(cache_dir)
    try:
        manifest = Manifest(**json.loads((directory / _MANIFEST).read_text(encoding="utf-8")))
        is_whole = manifest.source_sha256 == source.sha256 and all(
            (directory / name).stat().st_size == size for name, size in manifest.file_bytes.items()
        )
    except (OSError, ValueError, TypeError):
        return None
    return directory if is_whole else None


def convert_gguf(
    source: GgufSource, cache_dir: Path, *, fetch: Callable[[Path], Path], progress: Progress
) -> Path:
    """The directory of the conversion, made now if there is none. Needs up to 2 GB of memory for the demo.

    fetch: gives the file's path; may put it together in the scratch folder that it is handed.
    Only one process converts at a time, the others wait for it. Raises ModelLoadError.
    """
    root = cache_dir / "gguf"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock"):
            if (found := find_conversion(source, cache_dir)) is not None:
                return found
            # Whoever holds the lock is alone: other partial directories are rests of a killed process.
            for leftover in root.glob(f"{_PARTIAL}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=root) as scratch:
                return _convert_in(Path(scratch), source, source.directory(cache_dir), fetch, progress)
    except OSError as exc:
        raise ModelLoadError(
            f"cannot keep the converted model in {root}: {exc}",
            hint="set FORKPOINT_CACHE to a folder with a few GB of free space",
        ) from exc


def file_sha256(path: Path, *, cache_dir: Path, progress: Progress) -> str:
    """Check sum of a file; known from before as long as its size and time of change are the same."""
    stat = path.stat()
    location = str(path.resolve())
    seen_as = {"path": location, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    note = cache_dir / "gguf" / "sources" / f"{_short_hash(location)}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if {key: known[key] for key in seen_as} == seen_as:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not seen before, or the note was cut off: the sum is computed anew
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(16 * 2**20):
            digest.update(block)
            progress("check sum", file.tell(), stat.st_size)
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(seen_as | {"sha256": digest.hexdigest()}), encoding="utf-8")
    partial.replace(note)
    return digest.hexdigest()


def _convert_in(
    scratch: Path, source: GgufSource, directory: Path, fetch: Callable[[Path], Path], progress: Progress
) -> Path:
    path = fetch(scratch)
    output = scratch / "checkpoint"
    output.mkdir()
    write_checkpoint(path, output, chat_template=source.chat_template, progress=progress)
    generation_path = output / "generation_config.json"
    generation = json.loads(generation_path.read_text(encoding="utf-8")) | dict(source.sampling)
    generation_path.write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")
    manifest = Manifest(
        source_name=path.name,
        source_sha256=source.sha256,
        converter_version=CONVERTER_VERSION,
        file_bytes={file.name: file.stat().st_size for file in sorted(output.iterdir())},
    )
    (output / _MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    if directory.exists():  # found broken: a file was deleted or cut off
        shutil.rmtree(directory)
    output.rename(directory)
    return directory


def write_checkpoint(path: Path, output: Path, *, chat_template: str | None, progress: Progress) -> None:
    """Write config, weights and tokenizer of the GGUF file at `path` into the empty folder `output`.

    Raises ModelLoadError for a file that is no GGUF or incomplete, for a tensor or a setting that the model
    would not use, and for missing ones.
    """
    # Imported here: a start that finds its conversion needs none of them.
    from forkpoint.model.gguf_config import Metadata, build_config
    from forkpoint.model.gguf_reader import QuickGgufReader
    from forkpoint.model.gguf_tensors import (
        BYTES_PER_WEIGHT,
        ROPE_FACTORS,
        WeightsDtype,
        dequantised,
        restored,
        target_names,
        write_shards,
    )
    from forkpoint.model.gguf_tokenizer import write_tokenizer

    progress("reading the GGUF file", 0, 1)
    try:
        reader = QuickGgufReader(path)
        metadata = Metadata({name: field.contents() for name, field in reader.fields.items()})
    except (ValueError, IndexError, KeyError, OverflowError) as exc:
        raise ModelLoadError(f"{path} is no GGUF file, or it is cut off: {exc}") from exc
    progress("reading the GGUF file", 1, 1)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = build_config(
        metadata,
        vocab_size=int(_required(tensors, "token_embd.weight").shape[1]),
        has_output="output.weight" in tensors,
        rope_factors=dequantised(tensors[ROPE_FACTORS]) if ROPE_FACTORS in tensors else None,
    )
    names = target_names(metadata.architecture, list(tensors), num_layers=config["num_hidden_layers"])
    # The largest first: the embedding, often larger than a shard may be, gets one of its own.
    order = sorted(names, key=lambda name: -tensors[name].n_elements)

    def values() -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name in order:
            yield (
                names[name],
                restored(
                    metadata.architecture,
                    name,
                    dequantised(tensors[name]),
                    num_heads=config["num_attention_heads"],
                    num_kv_heads=config["num_key_value_heads"],
                ),
            )

    sizes = [int(tensors[name].n_elements) for name in order]
    is_small = sum(sizes) * BYTES_PER_WEIGHT["float32"] <= EXACT_UP_TO_BYTES
    dtype: WeightsDtype = "float32" if is_small else "bfloat16"
    write_shards(
        output,
        values(),
        sizes=sizes,
        dtype=dtype,
        on_tensor=lambda done: progress("converting weights", done, len(order)),
    )
    progress("building the tokenizer", 0, 1)
    write_tokenizer(output, metadata.values, architecture=metadata.architecture, chat_template=chat_template)
    progress("building the tokenizer", 1, 1)
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _required(tensors: dict[str, gguf.ReaderTensor], name: str) -> Any:
    if name not in tensors:
        raise ModelLoadError(f"the GGUF file lacks {name}", hint="is the file complete?")
    return tensors[name]
