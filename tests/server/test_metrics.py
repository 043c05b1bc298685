"""/metrics: the fixed names, their aliases, and counters that never go back."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from support.fake_engine import FakeEngine
from support.http_server import MODEL, World, serving


def test_every_fixed_name_is_there_from_the_start() -> None:
    with serving() as world:
        names = {name for name, _, _ in _samples(world)}
    assert names >= {
        f"forkpoint_{name}"
        for name in (
            "requests_running", "requests_waiting", "full_slots", "swa_slots", "prompt_tokens_total",
            "cached_tokens_total", "rebuilt_tokens_total", "computed_tokens_total", "generation_tokens_total",
            "requests_total", "evicted_slots_total", "swa_windows_total", "branch_points_total",
            "retractions_total", "engine_restarts_total", "recomputed_tokens_total",
            "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count",
            "e2e_request_latency_seconds_sum", "queue_time_seconds_bucket", "step_seconds_bucket",
            "batch_rows_bucket",
        )
    }  # fmt: skip
    assert names >= {
        f"vllm:{name}"
        for name in (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
            "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
            "generation_tokens_total", "time_to_first_token_seconds_bucket",
            "inter_token_latency_seconds_count", "e2e_request_latency_seconds_sum", "request_success_total",
            "num_preemptions_total",
        )
    }  # fmt: skip


def test_one_request_is_seen_in_all_figures() -> None:
    with serving(FakeEngine(cached_tokens=2)) as world:
        world.complete(prompt="hello", max_tokens=5)
        samples = {(name, labels): value for name, labels, value in _samples(world)}
    model = (("model_name", MODEL),)
    assert samples["forkpoint_requests_total", (("finish_reason", "length"),)] == 1
    assert samples["forkpoint_prompt_tokens_total", ()] == 6
    assert samples["forkpoint_cached_tokens_total", ()] == 2
    assert samples["forkpoint_generation_tokens_total", ()] == 5
    assert samples["forkpoint_full_slots", (("state", "leased"),)] == 96
    assert samples["forkpoint_swa_slots", (("state", "tree"),)] == 512
    assert samples["forkpoint_time_to_first_token_seconds_count", ()] == 1
    assert samples["forkpoint_inter_token_latency_seconds_count", ()] == 4
    assert samples["forkpoint_e2e_request_latency_seconds_count", ()] == 1
    assert samples["forkpoint_queue_time_seconds_sum", ()] == 0.25
    assert samples["forkpoint_batch_rows_count", ()] == 5
    assert samples["forkpoint_batch_rows_sum", ()] == 6 + 4
    assert samples["forkpoint_step_seconds_count", (("phase", "prefill"),)] == 1
    assert samples["forkpoint_step_seconds_count", (("phase", "decode"),)] == 4
    assert samples["vllm:prefix_cache_queries_total", model] == 6
    assert samples["vllm:prefix_cache_hits_total", model] == 2
    assert samples["vllm:generation_tokens_total", model] == 5
    assert samples["vllm:time_to_first_token_seconds_count", model] == 1
    assert samples["vllm:time_to_first_token_seconds_bucket", (("le", "+Inf"), *model)] == 1
    assert samples["vllm:request_success_total", (("finished_reason", "length"), *model)] == 1
    # (leased + locked) / capacity: 296 / 4096 in the full pool, 768 / 2048 in the SWA pool.
    assert samples["vllm:kv_cache_usage_perc", model] == 0.375


def test_counters_go_on_when_the_engine_starts_again() -> None:
    with serving() as world:
        world.complete(max_tokens=5)
        world.engine.die()
        assert world.metric("forkpoint_generation_tokens_total") == 5
        world.engine.restart()
        assert world.metric("forkpoint_generation_tokens_total") == 5
        world.complete(max_tokens=2)
        assert world.metric("forkpoint_generation_tokens_total") == 7


def test_refused_requests_are_counted_by_reason() -> None:
    with serving() as world:
        world.refused("/v1/completions", {"prompt": "a", "n": 0})
        world.refused("/v1/completions", {"prompt": "x" * 5000})
        world.refused("/v1/completions", {"prompt": "a", "model": "other"}, 404)
        for reason in ("invalid_request", "context_length_exceeded", "model_not_found"):
            assert world.metric(f'forkpoint_rejected_requests_total{{reason="{reason}"}}') == 1


def _samples(world: World) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    families = text_string_to_metric_families(world.http.get("/metrics").text)
    return [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in families
        for sample in family.samples
    ]
