"""A span for each generation request, with the phases of its choices below: over real requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from support.fake_engine import FakeEngine, says
from support.http_server import MODEL, raw_request, read_until, serving
from support.spans import CollectedSpans

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SECRET = "Kassandra"


@pytest.fixture
def spans() -> CollectedSpans:
    return CollectedSpans()


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def test_chat_is_told_by_the_conventions(spans: CollectedSpans) -> None:
    with serving(FakeEngine(reply=says("abc")), tracing=spans.tracing) as world:
        answer = world.openai.chat.completions.create(
            model="alias",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            temperature=0.5,
            top_p=0.25,
            frequency_penalty=0.5,
            presence_penalty=-1.0,
            extra_body={"top_k": 7},
            extra_headers={"x-request-id": "my-id"},
        )
    span = spans.request()
    assert span.name == "chat alias"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    attributes = attributes_of(span)
    assert answer.usage is not None
    for time in ("time_in_queue", "time_to_first_token", "e2e"):
        assert attributes.pop(f"gen_ai.latency.{time}") >= 0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "forkpoint",
        "gen_ai.request.id": "my-id",
        "gen_ai.request.model": "alias",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.frequency_penalty": 0.5,
        "gen_ai.request.presence_penalty": -1.0,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "alias",
        "gen_ai.response.id": answer.id,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "forkpoint.usage.rebuilt_tokens": 0,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "hi"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "chat"),
        ("/v1/responses", {"input": "hi"}, "chat"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_every_api_has_its_operation_and_its_id(
    path: str, body: dict[str, Any], operation: str, is_stream: bool, spans: CollectedSpans
) -> None:
    length = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    with serving(tracing=spans.tracing) as world:
        answer = world.http.post(path, json={**body, "model": MODEL, length: 2, "stream": is_stream}).text
    span = spans.request()
    assert span.name == f"{operation} {MODEL}"
    attributes = attributes_of(span)
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["http.route"] == path
    assert attributes["gen_ai.request.stream"] is is_stream
    assert f'"{attributes["gen_ai.response.id"]}"' in answer
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert ("gen_ai.response.time_to_first_chunk" in attributes) is is_stream


def test_span_is_the_child_of_the_caller_s(spans: CollectedSpans) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
    with serving(tracing=spans.tracing) as world:
        world.openai.completions.create(model="alias", prompt="hi", max_tokens=1, extra_headers=headers)
    span = spans.request()
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert {f"{each.context.trace_id:032x}" for each in spans.all if each.context} == {TRACE_ID}
    assert span.context is not None and span.context.trace_state.get("vendor") == "1"


def test_a_caller_that_does_not_sample_gets_no_spans(spans: CollectedSpans) -> None:
    with serving(tracing=spans.tracing) as world:
        for flags in ("00", "01"):
            world.http.post(
                "/v1/completions",
                json={"prompt": "hi", "max_tokens": 1},
                headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"},
            ).raise_for_status()
    spans.request()
    assert [span.kind for span in spans.all].count(SpanKind.SERVER) == 1


@pytest.mark.parametrize(
    "traceparent",
    ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}", "\xff" * 60, "0" * 9000],
)
def test_a_damaged_traceparent_begins_a_trace_of_its_own(traceparent: str, spans: CollectedSpans) -> None:
    with serving(tracing=spans.tracing) as world:
        world.http.post(
            "/v1/completions",
            json={"prompt": "hi", "max_tokens": 1},
            headers={b"traceparent": traceparent.encode("latin-1")},
        ).raise_for_status()
    assert spans.request().parent is None


def test_phases_of_each_choice_follow_each_other_within_the_request(spans: CollectedSpans) -> None:
    with serving(tracing=spans.tracing) as world:
        world.complete(prompt=["hi", "ho"], n=2, max_tokens=3)
    request = spans.request()
    below = spans.below(request)
    assert len(below) == len(spans.all) - 1 == 4 * 3
    for index in range(4):
        phases = [span for span in below if attributes_of(span)["forkpoint.choice.index"] == index]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        times: list[Any] = [request.start_time]
        for phase in phases:
            times += [phase.start_time, phase.end_time]
        times.append(request.end_time)
        assert times == sorted(times)
        assert times[2] == times[3] and times[4] == times[5]
        assert attributes_of(phases[2])["gen_ai.usage.output_tokens"] == 3
    attributes = attributes_of(request)
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert attributes["gen_ai.usage.output_tokens"] == 12


def test_many_choices_do_not_flood_the_collector(spans: CollectedSpans) -> None:
    with serving(tracing=spans.tracing) as world:
        world.complete(n=40, max_tokens=1)
    request = spans.request()
    assert {attributes_of(span)["forkpoint.choice.index"] for span in spans.below(request)} == set(range(16))
    assert len(attributes_of(request)["gen_ai.response.finish_reasons"]) == 40


def test_prefill_tells_what_was_cached_rebuilt_and_computed(spans: CollectedSpans) -> None:
    with serving(FakeEngine(cached_tokens=5, rebuilt_tokens=2), tracing=spans.tracing) as world:
        world.complete(prompt="0123456789", max_tokens=1)
    request = spans.request()
    _, prefill, _ = spans.below(request)
    assert attributes_of(prefill) == {
        "forkpoint.choice.index": 0,
        "forkpoint.prefill.cached_tokens": 5,
        "forkpoint.prefill.rebuilt_tokens": 2,
        "forkpoint.prefill.computed_tokens": 4,  # a token begins the text
    }
    (rebuild,) = prefill.events
    assert rebuild.name == "rebuild"
    assert dict(rebuild.attributes or {}) == {"forkpoint.prefill.rebuilt_tokens": 2}
    assert rebuild.timestamp == prefill.start_time
    assert attributes_of(request)["gen_ai.usage.cache_read.input_tokens"] == 5
    assert attributes_of(request)["forkpoint.usage.rebuilt_tokens"] == 2


def test_nothing_is_told_of_a_rebuild_where_there_was_none(spans: CollectedSpans) -> None:
    with serving(FakeEngine(cached_tokens=5), tracing=spans.tracing) as world:
        world.complete(prompt="0123456789", max_tokens=1)
    assert not any(span.events for span in spans.below(spans.request()))


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_client_that_leaves_is_an_event_and_no_error(is_queued: bool, spans: CollectedSpans) -> None:
    engine = FakeEngine(is_held=True, is_admitting=not is_queued)
    with (
        serving(engine, tracing=spans.tracing) as world,
        raw_request(world.url, "/v1/completions", {"prompt": "hi", "stream": True}) as connection,
    ):
        engine.until(lambda: engine.submits)
        engine.step()
        if not is_queued:
            read_until(connection, b'"text":"h"')
        connection.close()
        engine.until(lambda: engine.aborts)
        request = spans.request()
    assert [event.name for event in request.events] == ["client disconnected"]
    assert request.status.status_code is StatusCode.UNSET
    assert attributes_of(request)["gen_ai.response.finish_reasons"] == ("abort",)
    assert "http.response.status_code" not in attributes_of(request)
    names = [span.name for span in spans.below(request)]
    assert names == (["queue"] if is_queued else ["queue", "prefill", "decode"])


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"{", 400, "invalid_json"),
        ({"prompt": "hi", "temperature": 9}, 400, "invalid_request_error"),
        ({"prompt": "x" * 3000}, 400, "context_length_exceeded"),
        ({"prompt": "hi", "model": "other"}, 404, "model_not_found"),
    ],
)
def test_a_refusal_has_its_status_and_code(body: Any, status: int, error: str, spans: CollectedSpans) -> None:
    with serving(tracing=spans.tracing) as world:
        world.refused("/v1/completions", body, status)
    request = spans.request()
    assert request.status.status_code is StatusCode.ERROR
    assert attributes_of(request)["error.type"] == error
    assert attributes_of(request)["http.response.status_code"] == status
    (event,) = request.events
    assert event.name == "exception"
    assert dict(event.attributes or {}) == {"exception.type": "forkpoint.configs.errors.RequestError"}
    assert spans.below(request) == []


def test_a_full_queue_is_an_error_of_the_request_that_it_refuses(spans: CollectedSpans) -> None:
    with serving(FakeEngine(max_queued=0), tracing=spans.tracing) as world:
        world.refused("/v1/completions", {"prompt": "hi", "model": "alias"}, 429)
    request = spans.request()
    assert attributes_of(request)["http.response.status_code"] == 429
    assert attributes_of(request)["gen_ai.request.model"] == "alias"
    assert request.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_fails_while_it_runs_is_an_error(is_stream: bool, spans: CollectedSpans) -> None:
    engine = FakeEngine(is_held=True)
    with (
        serving(engine, tracing=spans.tracing) as world,
        raw_request(world.url, "/v1/completions", {"prompt": "hi", "stream": is_stream}) as connection,
    ):
        engine.until(lambda: engine.submits)
        engine.step()
        if is_stream:
            read_until(connection, b'"text":"h"')
        engine.fail_sequence(engine.submits[0].uid, "no room")
        read_until(connection, b"generation_failed")
        request = spans.request()
    assert request.status.status_code is StatusCode.ERROR
    attributes = attributes_of(request)
    assert attributes["error.type"] == "generation_failed"
    assert attributes["http.response.status_code"] == (200 if is_stream else 500)
    assert attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert [span.name for span in spans.below(request)] == ["queue", "prefill", "decode"]


def test_text_of_prompts_and_answers_is_in_no_span(spans: CollectedSpans) -> None:
    with serving(FakeEngine(reply=says(f"{SECRET}!")), tracing=spans.tracing) as world:
        world.complete(prompt=SECRET, stop=[SECRET[-3:] + "!"], echo=True, max_tokens=20)
        world.chat(messages=[{"role": "user", "content": SECRET}], max_tokens=4)
        world.refused("/v1/completions", {"prompt": SECRET, "suffix": SECRET, "n": SECRET})
        world.refused("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]})
        world.refused("/v1/completions", {"prompt": "hi", "model": SECRET}, 404)
        for _ in range(5):
            spans.request()
    told = json.dumps([json.loads(span.to_json()) for span in spans.all])
    assert "gen_ai.usage.input_tokens" in told
    assert SECRET not in told and SECRET[:4] not in told


def test_other_requests_have_no_span(spans: CollectedSpans) -> None:
    with serving(tracing=spans.tracing) as world:
        for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
            world.http.get(path)
        world.complete(max_tokens=1)
        spans.request()
    assert [span.name for span in spans.all if span.parent is None] == [f"text_completion {MODEL}"]
