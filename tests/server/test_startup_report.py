"""The start-up report: what was loaded and what fits, in figures that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fake_engine import INFO
from support.http_server import serving

from forkpoint.configs.serving import SamplingDefaults
from forkpoint.server.startup_report import (
    report_fields,
    report_text,
    short_pattern,
    start_fields,
    start_text,
)

HYBRID = replace(
    INFO,
    family="gemma3_text",
    num_parameters=268_098_176,
    weight_bytes=536_196_352,
    dtype="bfloat16",
    device="cpu",
    layer_pattern="SSSSSF" * 3,
    window=512,
    kv_cache_dtype="bfloat16",
    full_tokens=65_536,
    full_bytes_per_token=3072,
    swa_tokens=8192,
    swa_bytes_per_token=15_360,
    page_size=16,
)


@pytest.mark.parametrize(
    ("pattern", "short"),
    [
        ("SSSSSF" * 3, "SSSSSF x 3"),
        ("SSSSSF" * 4 + "SS", "SSSSSF x 4 + SS"),
        ("F" * 32, "F x 32"),
        ("SF", "S F"),
        ("F", "F"),
        ("FSSSSFSSSSFS", "FSSSS x 2 + FS"),
        ("FFSSSFSSSSS", "F2 S3 F S5"),
    ],
)
def test_layer_pattern_is_shortened(pattern: str, short: str) -> None:
    assert short_pattern(pattern) == short


@pytest.mark.parametrize(
    ("count", "told"), [(0, "in bfloat16 on cpu\n"), (1, "on cpu, 1 thread\n"), (8, "on cpu, 8 threads\n")]
)
def test_report_tells_how_many_threads_compute(count: int, told: str) -> None:
    assert told in report_text(replace(HYBRID, num_threads=count), SamplingDefaults())


def test_report_for_people_tells_parameters_layers_pools_and_limits() -> None:
    text = report_text(HYBRID, SamplingDefaults())
    assert "gemma3_text, 268,098,176 parameters" in text
    assert "511.4 MiB in bfloat16 on cpu" in text
    assert "SSSSSF x 3 (3 full and 15 sliding, window 512)" in text
    assert "65,536 tokens of full attention, 3,072 bytes each: 192.0 MiB in bfloat16, pages of 16" in text
    assert "8,192 tokens of sliding window, 15,360 bytes each: 120.0 MiB" in text
    assert "context 2,048 tokens" in text
    assert "sampling" not in text


def test_kind_that_the_model_lacks_is_left_out() -> None:
    only_full = replace(HYBRID, layer_pattern="F" * 4, window=None, swa_tokens=0, swa_bytes_per_token=0)
    assert "KV swa" not in report_text(only_full, SamplingDefaults())
    assert not [name for name in report_fields(only_full) if name.startswith("swa")]


def test_recommended_sampling_is_told_where_it_differs() -> None:
    text = report_text(HYBRID, SamplingDefaults(temperature=0.6, top_k=20))
    assert "temperature 0.6, top_k 20 by default (generation_config.json)" in text


def test_log_line_has_the_same_figures() -> None:
    fields = report_fields(HYBRID)
    assert fields["layers"] == "SSSSSF x 3"
    assert fields["full_pool_bytes"] == 65_536 * 3072
    assert (fields["swa_tokens"], fields["swa_bytes_per_token"]) == (8192, 15_360)


def test_server_info_has_them_too() -> None:
    with serving(sampling_defaults=SamplingDefaults(top_k=20)) as world:
        info = world.http.get("/server_info").json()
    assert info["sampling_defaults"]["top_k"] == 20
    assert info["full_tokens"] == INFO.full_tokens
    assert {"weight_bytes", "full_bytes_per_token", "swa_bytes_per_token", "num_parameters"} <= set(info)


def test_the_start_is_told_by_stages_in_the_log_and_for_people() -> None:
    own = (("command line", 0.41), ("model", 0.004), ("tokenizer", 1.5), ("waiting for the engine", 2.0))
    engine = (("imports", 2.21), ("loading weights", 0.7))
    assert start_text(own, engine).splitlines() == [
        "  start     ready in 3.9 s: command line 0.4, tokenizer 1.5, waiting for the engine 2.0",
        "            beside it the engine 2.9 s: imports 2.2, loading weights 0.7",
    ]
    fields = start_fields(own, engine)
    assert fields["ready_s"] == 3.91
    assert fields["stages"] == {
        "command line": 0.41, "model": 0.0, "tokenizer": 1.5, "waiting for the engine": 2.0
    }  # fmt: skip
    assert fields["engine_stages"] == dict(engine)
