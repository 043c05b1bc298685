"""`forkpoint serve --otlp-traces-endpoint`: a repeated prompt's reuse, as a collector gets to see it."""

from __future__ import annotations

from pathlib import Path

from support.collector import collecting
from support.served import serve_ready

PROMPT = "so much of this prompt is the same again " * 4


def test_traces_of_a_whole_server_tell_what_was_reused(letters_dir: Path) -> None:
    with collecting() as collector:
        flags = ("--page-size", "4", "--otlp-traces-endpoint", collector.url)
        with serve_ready(letters_dir, *flags) as served:
            usages = [served.complete(PROMPT, max_tokens=4, ignore_eos=True)["usage"] for _ in range(2)]
        # The server has ended: what it had not sent, it sent then.
        spans = [
            span
            for export in collector.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    requests = sorted(
        (span for span in spans if span.name.startswith("text_completion ")),
        key=lambda span: span.start_time_unix_nano,
    )
    told = [{each.key: each.value.int_value for each in span.attributes} for span in requests]
    assert [each["gen_ai.usage.input_tokens"] for each in told] == [each["prompt_tokens"] for each in usages]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usages]
    assert [each["gen_ai.usage.cache_read.input_tokens"] for each in told] == cached
    assert cached[0] == 0 < cached[1]
    for request in requests:
        below = [span for span in spans if span.parent_span_id == request.span_id]
        assert [span.name for span in below] == ["queue", "prefill", "decode"]
        assert {span.trace_id for span in below} == {request.trace_id}
        assert request.start_time_unix_nano <= below[0].start_time_unix_nano
        assert below[2].end_time_unix_nano <= request.end_time_unix_nano
