"""Where a served model may come from: the hub, and then its cache alone; or nowhere, with dummy weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.hub_double import Repo, hub_double
from support.served import ServedModel, launch, serve_ready

PROMPT = "hello world"


@pytest.fixture
def _hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("_hub_cache")
def test_hub_model_is_served_and_later_without_the_hub(
    letters_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_double(org__tiny=letters_dir) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["org/tiny"] = Repo({"v1": letters_dir, "main": tmp_path})
        with serve_ready("org/tiny@v1") as served:
            assert [model.id for model in served.openai.models.list()] == ["tiny"]
            expected = served.text(PROMPT, max_tokens=12)
            assert "fetching weights: 100 %" in served.log.text
            _check_report(served)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serve_ready("org/tiny@v1") as served:
        assert served.text(PROMPT, max_tokens=12) == expected


def _check_report(served: ServedModel) -> None:
    """The log line at the start, /server_info and the tiny model's true figures agree."""
    start = served.log.wait_for_event("start_took")
    assert list(start["stages"])[-3:] == ["tokenizer", "chat template", "waiting for the engine"]
    assert "imports" in start["engine_stages"] and "warming up" in start["engine_stages"]
    line = served.log.wait_for_event("ready")
    info = served.http.get("/server_info").json()
    assert line["layers"] == "S3 F"
    assert line["parameters"] == info["num_parameters"]
    assert line["weight_bytes"] == info["weight_bytes"] == 4 * line["parameters"]  # float32, untied
    # One full layer and three of sliding window, 2 heads of 32 for keys and for values, 4 bytes
    assert line["full_bytes_per_token"] == info["full_bytes_per_token"] == 2 * 64 * 4
    assert line["swa_bytes_per_token"] == info["swa_bytes_per_token"] == 3 * 2 * 64 * 4
    for kind in ("full", "swa"):
        pool = served.pool(kind)
        assert line[f"{kind}_tokens"] == info[f"{kind}_tokens"] == sum(pool.values())


@pytest.mark.usefixtures("_hub_cache")
@pytest.mark.parametrize("name", ["org/absent", "absent"])
def test_model_that_the_hub_does_not_have_ends_with_one_line_and_a_hint(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_double() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with launch(name, "--port", "0") as process:
            _, log = process.communicate(timeout=120)
    assert process.returncode == 2
    error, hint = [line for line in log.splitlines() if line.startswith(("forkpoint: error", "hint"))]
    assert f"{name} is no directory here, and the hub has no such model" in error
    assert "HF_TOKEN" in hint
    assert "Traceback" not in log


@pytest.fixture
def greedy_dir(letters_dir: Path, tmp_path: Path) -> Path:
    """A model that recommends to take the most likely token."""
    directory = shutil.copytree(letters_dir, tmp_path / "greedy")
    generation = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps(generation | {"top_k": 1}))
    return directory


def _sampled_texts(served: ServedModel) -> set[str]:
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
    answers = [served.http.post("/v1/completions", json=body).json() for _ in range(4)]
    return {answer["choices"][0]["text"] for answer in answers}


def test_recommended_sampling_is_the_default_of_requests(greedy_dir: Path) -> None:
    with serve_ready(greedy_dir) as served:
        assert len(_sampled_texts(served)) == 1


def test_dummy_weights_need_no_weights_and_recommendations_can_be_passed_over(greedy_dir: Path) -> None:
    (greedy_dir / "model.safetensors").unlink()
    with serve_ready(greedy_dir, "--load-format", "dummy", "--generation-config", "none") as served:
        texts = _sampled_texts(served)
    assert len(texts) == 4
    assert all(len(set(text)) > 3 for text in texts)  # neither NaN nor one token over and over
