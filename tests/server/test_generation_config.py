"""What a checkpoint recommends is the default of requests, and of those only that say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.http_server import serving

from forkpoint.configs.errors import ModelLoadError
from forkpoint.configs.serving import SamplingDefaults
from forkpoint.server.generation_config import read_sampling_defaults


def _model_dir(tmp_path: Path, **settings: Any) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    model_dir = _model_dir(
        tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, do_sample=True
    )
    assert read_sampling_defaults(model_dir) == SamplingDefaults(0.6, 0.95, 20, 0.05, 1.1)


def test_without_a_file_or_a_word_of_it_the_defaults_are_those_of_openai(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)
    quiet = _model_dir(tmp_path, eos_token_id=[1, 106], temperature=None, do_sample=False, top_k=-1)
    assert read_sampling_defaults(quiet) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.5),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("top_k", -2),
    ],
)
def test_value_that_no_request_may_have_is_named(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json sets {name} to") as error:
        read_sampling_defaults(_model_dir(tmp_path, **{name: value}))
    assert "--generation-config none" in str(error.value.hint)


def test_requests_get_the_recommended_sampling_unless_they_say_otherwise() -> None:
    defaults = SamplingDefaults(0.6, 0.95, 20, 0.05, 1.1)
    with serving(sampling_defaults=defaults) as world:
        world.complete(max_tokens=1)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert world.http.post("/v1/chat/completions", json=body).status_code == 200
        own = {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        world.complete(max_tokens=1, **own)
        sampled = [submit.params for submit in world.engine.submits]
    found = [
        SamplingDefaults(each.temperature, each.top_p, each.top_k, each.min_p, each.repetition_penalty)
        for each in sampled
    ]
    assert found == [defaults, defaults, SamplingDefaults(0.0, 1.0, 0, 0.0, 1.0)]
