"""Only what serving needs of a hub's model is fetched, again after a cut, and every refusal is explained.

Each fetch runs in a process of its own, since huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.hub_double import HubDouble, Repo, hub_double
from support.tiny_checkpoints import save_tiny_checkpoint

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.hub import HubModel, explained

_FETCH = """
import json, sys
from pathlib import Path
from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.resolve import resolve_model

reports = []
try:
    directory = resolve_model(
        sys.argv[1], cache_dir=Path(sys.argv[2]), progress=lambda *report: reports.append(report),
        has_weights=sys.argv[3:] != ["without-weights"],
    )
    files = sorted(path.name for path in directory.iterdir())
    answer = {"directory": str(directory), "files": files}
except ModelLoadError as error:
    answer = {"error": str(error), "hint": error.hint}
print(json.dumps(answer | {"reports": reports, "imports_torch": "torch" in sys.modules}))
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in several shards, with what else lies in repositories of the hub."""
    directory = save_tiny_checkpoint(
        "llama", tmp_path_factory.mktemp("models") / "tiny", max_shard_size="300KB"
    )
    (directory / "tokenizer.json").write_text("{}")
    (directory / "modeling_tiny.py").write_text("raise SystemExit\n")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "consolidated.safetensors").write_bytes(b"twice")
    (directory / "original").mkdir()
    (directory / "original" / "model.safetensors").write_bytes(b"thrice")
    return directory


@pytest.fixture
def hub(model_dir: Path) -> Iterator[HubDouble]:
    with hub_double(org__tiny=model_dir) as hub:
        yield hub


class Fetcher:
    """Fetches in new processes that share one cache. environment: on top of the hub's address."""

    def __init__(self, hub: HubDouble, home: Path) -> None:
        self.hub = hub
        self.home = home

    def __call__(self, name: str, *arguments: str, **environment: str) -> dict[str, Any]:
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        settings = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), **environment}
        done = subprocess.run(
            [sys.executable, "-c", _FETCH, name, str(self.home / "own"), *arguments],
            env=ours | settings,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert not answer["imports_torch"]
        return answer

    def refusal(self, name: str, **environment: str) -> tuple[str, str]:
        """Message and hint: one line each."""
        answer = self(name, **environment)
        assert "error" in answer, answer
        assert "\n" not in answer["error"] + answer["hint"]
        return answer["error"], answer["hint"]


@pytest.fixture
def fetch(hub: HubDouble, tmp_path: Path) -> Fetcher:
    return Fetcher(hub, tmp_path / "home")


def _shards(model_dir: Path) -> list[str]:
    return sorted(path.name for path in model_dir.glob("model-*.safetensors"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        ("gpt2", HubModel("gpt2")),
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("./org/name", None),
        ("./name", None),
        ("../name", None),
        (".", None),
        ("/org/name", None),
        ("~/name", None),
        ("a/b/c", None),
        ("two words", None),
        ("org/name@", None),
        ("", None),
    ],
)
def test_hub_ids_are_told_from_paths(name: str, expected: HubModel | None) -> None:
    assert HubModel.parse(name) == expected


def test_only_what_serving_needs_is_fetched(hub: HubDouble, fetch: Fetcher, model_dir: Path) -> None:
    answer = fetch("org/tiny")
    fetched = {name for name, _ in hub.downloads()}
    index = "model.safetensors.index.json"
    assert len(_shards(model_dir)) > 3
    assert fetched == {"config.json", "generation_config.json", "tokenizer.json", index, *_shards(model_dir)}
    assert set(answer["files"]) == fetched
    for name in fetched:
        assert (Path(answer["directory"]) / name).read_bytes() == (model_dir / name).read_bytes()


def test_progress_counts_the_bytes_of_the_weights(fetch: Fetcher, model_dir: Path) -> None:
    reports = [
        (done, total) for what, done, total in fetch("org/tiny")["reports"] if what == "fetching weights"
    ]
    total = sum((model_dir / name).stat().st_size for name in _shards(model_dir))
    assert {total for _, total in reports} == {total}
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)


def test_second_fetch_takes_everything_from_the_cache(hub: HubDouble, fetch: Fetcher) -> None:
    first = fetch("org/tiny")["directory"]
    hub.requests.clear()
    assert fetch("org/tiny")["directory"] == first
    assert hub.downloads() == []
    hub.requests.clear()
    assert fetch("org/tiny", HF_HUB_OFFLINE="1")["directory"] == first
    assert hub.requests == []


def test_cache_is_enough_when_the_hub_is_gone(fetch: Fetcher) -> None:
    first = fetch("org/tiny")["directory"]
    assert fetch("org/tiny", HF_ENDPOINT=_nobody())["directory"] == first


def test_closed_connection_is_resumed_where_it_broke_off(
    hub: HubDouble, fetch: Fetcher, model_dir: Path, tmp_path: Path
) -> None:
    block = 10 * 2**20  # the library writes blocks of this size
    large = tmp_path / "large"
    large.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model_dir / name, large)
    (large / "model.safetensors").write_bytes(os.urandom(5 * block // 2))
    hub.repos["org/large"] = Repo({"main": large})
    hub.cuts["model.safetensors"] = 3 * block // 2
    answer = fetch("org/large")
    weights = [byte_range for name, byte_range in hub.downloads() if name == "model.safetensors"]
    assert weights == [None, f"bytes={block}-"]
    assert (Path(answer["directory"]) / "model.safetensors").read_bytes() == (
        large / "model.safetensors"
    ).read_bytes()
    assert _weight_reports(answer) == [(done * block // 2, 5 * block // 2) for done in (2, 4, 5)]


def test_reset_connection_is_tried_again(hub: HubDouble, fetch: Fetcher, model_dir: Path) -> None:
    shard = _shards(model_dir)[1]
    hub.cuts[shard], hub.resets = 100_000, True
    answer = fetch("org/tiny")
    assert len([name for name, _ in hub.downloads() if name == shard]) == 2
    assert (Path(answer["directory"]) / shard).read_bytes() == (model_dir / shard).read_bytes()


def test_interrupted_fetch_goes_on_with_the_next_file(
    hub: HubDouble, fetch: Fetcher, model_dir: Path
) -> None:
    first, second = _shards(model_dir)[:2]
    lost = model_dir / second
    kept = lost.read_bytes()
    try:
        lost.unlink()  # the hub answers 404 in the middle of the fetch
        hub.repos["org/tiny"] = _with_listing(model_dir, second, len(kept))
        message, _ = fetch.refusal("org/tiny")
        assert "404" in message
    finally:
        lost.write_bytes(kept)
    hub.requests.clear()
    fetch("org/tiny")
    names = [name for name, _ in hub.downloads()]
    assert first not in names
    assert second in names


def test_revision_is_a_model_of_its_own(
    hub: HubDouble, fetch: Fetcher, model_dir: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model_dir, tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": 77}')
    shard = _shards(model_dir)[0]
    (other / shard).write_bytes(b"other weights")
    hub.repos["org/tiny"] = Repo({"main": model_dir, "v2": other})
    main, second = fetch("org/tiny")["directory"], fetch("org/tiny@v2")["directory"]
    assert main != second
    assert (Path(main) / shard).read_bytes() == (model_dir / shard).read_bytes()
    assert (Path(second) / shard).read_bytes() == b"other weights"
    assert json.loads((Path(second) / "generation_config.json").read_text()) == {"eos_token_id": 77}
    by_commit = fetch(f"org/tiny@{Path(second).name}")["directory"]
    assert by_commit == second
    message, _ = fetch.refusal("org/tiny@v3")
    assert "org/tiny has no revision v3" in message


def test_weights_are_left_out_on_request(hub: HubDouble, fetch: Fetcher) -> None:
    assert "config.json" in fetch("org/tiny", "without-weights")["files"]
    assert not [name for name, _ in hub.downloads() if name.endswith(".safetensors")]


def test_model_out_of_scope_is_refused_before_its_weights_are_fetched(
    hub: HubDouble, fetch: Fetcher, model_dir: Path, tmp_path: Path
) -> None:
    awq = _edited(model_dir, tmp_path / "awq", quantization_config={"quant_method": "awq"})
    hub.repos["org/awq"] = Repo({"main": awq})
    message, _ = fetch.refusal("org/awq")
    assert "AWQ" in message
    assert not [name for name, _ in hub.downloads() if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": {"model_type": "llama"}, "tokenizer.json": {}, "pytorch_model.bin": 0}, "pickled"),
        ({"config.json": {"model_type": "llama"}, "tokenizer.json": {}}, "neither model.safetensors nor"),
        ({"config.json": {"model_type": "llama"}, "model.safetensors": 0}, "no tokenizer.json"),
        ({"adapter_config.json": {"base_model_name_or_path": "org/base"}}, "adapter (LoRA) for org/base"),
        ({"tiny-q4.gguf": 0}, "only GGUF files"),
        ({"README.md": 0}, "no config.json"),
    ],
)
def test_repository_that_is_no_model_is_told_what_it_is(
    hub: HubDouble, fetch: Fetcher, tmp_path: Path, files: Mapping[str, Any], message: str
) -> None:
    directory = tmp_path / "repository"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    hub.repos["org/other"] = Repo({"main": directory})
    assert message in fetch.refusal("org/other")[0]


def test_gated_model_needs_a_token_with_access(hub: HubDouble, fetch: Fetcher, model_dir: Path) -> None:
    hub.repos["org/gated"] = Repo({"main": model_dir}, token="hf_good", is_gated=True)
    message, hint = fetch.refusal("org/gated")
    assert "org/gated is gated" in message
    assert f"{hub.url}/org/gated" in hint and "HF_TOKEN" in hint
    message, hint = fetch.refusal("org/gated", HF_TOKEN="hf_other")
    assert "your token has no access" in message
    assert "hf_other" not in message + hint
    assert "config.json" in fetch("org/gated", HF_TOKEN="hf_good")["files"]


def test_absent_and_private_models_look_the_same(hub: HubDouble, fetch: Fetcher, model_dir: Path) -> None:
    hub.repos["org/private"] = Repo({"main": model_dir}, token="hf_good")
    for name in ("org/absent", "org/private"):
        message, hint = fetch.refusal(name)
        assert f"{name} is no directory here, and the hub has no such model" in message
        assert "HF_TOKEN" in hint
    assert "config.json" in fetch("org/private", HF_TOKEN="hf_good")["files"]


def test_what_is_not_in_the_cache_cannot_be_had_offline(fetch: Fetcher) -> None:
    message, hint = fetch.refusal("org/tiny", HF_HUB_OFFLINE="1")
    assert "neither a directory here nor in the cache" in message
    assert "HF_HUB_OFFLINE" in message and "HF_HUB_OFFLINE" in hint


def test_half_fetched_model_is_told_from_an_absent_one_offline(fetch: Fetcher) -> None:
    fetch("org/tiny", "without-weights")
    message, _ = fetch.refusal("org/tiny", HF_HUB_OFFLINE="1")
    assert "only in part in the cache" in message


def test_hub_that_cannot_be_reached_is_named(fetch: Fetcher) -> None:
    nobody = _nobody()
    message, hint = fetch.refusal("org/tiny", HF_ENDPOINT=nobody)
    assert f"the hub at {nobody} cannot be reached" in message
    assert "HF_ENDPOINT" in hint


@pytest.mark.parametrize("status", [403, 500])
def test_status_of_the_hub_is_told(hub: HubDouble, fetch: Fetcher, status: int) -> None:
    hub.status = status
    assert str(status) in fetch.refusal("org/tiny")[0]


def test_cache_that_cannot_be_written_names_the_setting(fetch: Fetcher, tmp_path: Path) -> None:
    fetch.home = tmp_path / "file"
    fetch.home.write_text("no folder")
    message, hint = fetch.refusal("org/tiny")
    assert "cannot be kept" in message and str(fetch.home) in message
    assert "HF_HOME" in hint


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EACCES, "kept in")]
)
def test_disk_that_fails_in_the_middle_is_explained(number: int, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as error, explained(HubModel("org/tiny")):
        raise OSError(number, os.strerror(number))
    assert "HF_HOME" in str(error.value.hint)


def test_disk_without_room_is_noticed_before_the_download(
    hub: HubDouble, fetch: Fetcher, model_dir: Path
) -> None:
    hub.repos["org/tiny"] = _with_listing(model_dir, _shards(model_dir)[0], 2**60)
    message, hint = fetch.refusal("org/tiny")
    assert "1,073,741,824.0 GiB" in message and "are free" in message
    assert "HF_HOME" in hint
    assert not [name for name, _ in hub.downloads() if name.endswith(".safetensors")]


def _weight_reports(answer: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(done, total) for what, done, total in answer["reports"] if what == "fetching weights"]


def _with_listing(directory: Path, name: str, size: int) -> Repo:
    """The repository, whose listing gives `name` this size whatever the file is."""
    return Repo({"main": directory}, listed_sizes={name: size})


def _nobody() -> str:
    """An address where nothing listens: of a server that is gone."""
    with hub_double() as gone:
        return gone.url


def _edited(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize(("typed", "meant"), [("demo2", "demo"), ("demochat", "demo-chat"), ("gpt2", None)])
def test_a_mistyped_demo_is_suggested_where_the_hub_has_no_such_model(
    fetch: Fetcher, typed: str, meant: str | None
) -> None:
    message, hint = fetch.refusal(typed)
    assert typed in message
    assert hint.startswith(f"did you mean {meant}?") if meant else "did you mean" not in hint
