"""Workloads are the published ones, token by token; pools have the published sizes; files are checked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from forkpoint.configs.errors import ConfigError
from forkpoint.scheduler.trace_file import read_trace
from forkpoint.scheduler.trace_ideal import ideal_hits
from forkpoint.scheduler.trace_pools import PoolSlots, ample_pools, tight_pools
from forkpoint.scheduler.traces import HEADER, TraceRequest, Workload, WorkloadKind, digest

DIGESTS: dict[tuple[WorkloadKind, int], str] = {
    ("shared", 2048): "5aa88f60478732de",
    ("shared", 8192): "f99a4c25f84a57fb",
    ("groups", 2048): "17d746ce1f43784c",
    ("groups", 8192): "1ed65d59f8e306f3",
    ("zipf", 2048): "128b0d13b9e19d2d",
    ("zipf", 8192): "a9b1daec59208f9c",
    ("fewshot", 2048): "1f2724f4c1179c51",
    ("fewshot", 8192): "87ea544663c1dbd3",
    ("chat", 2048): "7a6cd3e353afe67b",
    ("chat", 8192): "ae1e89473aa3189a",
}


def workload(kind: WorkloadKind, system_len: int = 2048) -> Workload:
    return Workload(kind, system_len, num_requests=16 if kind == "chat" else 64)


def request(prompt: list[int], output: list[int]) -> TraceRequest:
    return TraceRequest("", np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))


@pytest.mark.parametrize(("kind", "system_len"), DIGESTS)
def test_workloads_are_the_published_ones(kind: WorkloadKind, system_len: int) -> None:
    requests = workload(kind, system_len).requests()
    assert digest(requests) == DIGESTS[kind, system_len]
    assert [request.id for request in requests] == [str(index) for index in range(64)]


def test_anchors_are_the_ends_of_system_prompt_blocks_and_messages() -> None:
    assert {request.anchors for request in workload("shared").requests()} == {(2048,)}
    assert {request.anchors for request in workload("groups").requests()} == {(2048,)}
    assert {request.anchors for request in workload("fewshot").requests()} == {(1024, 2048)}
    turns = workload("chat").requests()[::16]  # of the first conversation
    for turn, later in enumerate(turns):
        assert len(later.anchors) == 2 + 2 * turn
        assert later.anchors[-1] == len(later.prompt) - len(HEADER)
    # What ended at an anchor once is in every later prompt.
    first, second = turns[0], turns[1]
    end = first.anchors[-1]
    assert second.anchors[:3] == (*first.anchors, end + 64)
    assert np.array_equal(second.prompt[:end], first.prompt[:end])
    assert np.array_equal(second.prompt[end : end + 64], first.output)


@pytest.mark.parametrize("kind", ["shared", "groups", "zipf", "fewshot", "chat"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_ideal_hits_equal_a_comparison_of_all_pairs(kind: WorkloadKind, page_size: int) -> None:
    requests = Workload(kind, 50, num_requests=12, num_groups=3, num_turns=2, output_len=8).requests()
    assert ideal_hits(requests, page_size) == all_pairs(requests, page_size)


def test_ideal_hits_of_overlapping_random_prompts() -> None:
    rng = random.Random(1)
    for _ in range(200):
        requests = [
            request(
                rng.choices([0, 1, 256, 2**31 - 1], k=rng.randint(1, 9)),
                rng.choices([0, 1], k=rng.randint(0, 3)),
            )
            for _ in range(8)
        ]
        assert ideal_hits(requests, 1) == all_pairs(requests, 1)


def all_pairs(requests: list[TraceRequest], page_size: int) -> list[int]:
    hits = []
    for index, later in enumerate(requests):
        longest = 0
        for earlier in requests[:index]:
            both = zip(later.prompt[:-1].tolist(), earlier.computed_tokens.tolist(), strict=False)
            shared = next((at for at, (one, other) in enumerate(both) if one != other), None)
            if shared is None:
                shared = min(len(later.prompt) - 1, len(earlier.computed_tokens))
            longest = max(longest, shared)
        hits.append(longest // page_size * page_size)
    return hits


@pytest.mark.parametrize(
    ("kind", "page_size", "ideal_pct"),
    [
        ("shared", 1, 91.31),
        ("groups", 1, 81.17),
        ("zipf", 1, 91.33),
        ("fewshot", 1, 86.24),
        ("chat", 1, 90.44),
    ]
    + [("chat", 16, 90.19)],
)
def test_ideal_is_the_published_share(kind: WorkloadKind, page_size: int, ideal_pct: float) -> None:
    requests = workload(kind).requests()
    prompts = sum(len(request.prompt) for request in requests)
    assert round(100 * sum(ideal_hits(requests, page_size)) / prompts, 2) == ideal_pct


@pytest.mark.parametrize(
    ("window", "page_size", "concurrency", "swa"),
    [(128, 1, 1, 4168), (128, 1, 8, 6422), (128, 16, 1, 4288), (512, 1, 8, 11798), (512, 16, 8, 12128)],
)
def test_tight_pools_have_the_published_sizes(
    window: int, page_size: int, concurrency: int, swa: int
) -> None:
    pools = tight_pools(
        workload("groups"), page_size=page_size, window=window, chunk=3072, concurrency=concurrency
    )
    full = 8 * 2048 + 16 * 320 + 3072 + 384 * concurrency
    assert pools == PoolSlots(-(-full // page_size) * page_size, swa)


@pytest.mark.parametrize(
    ("kind", "page_size", "slots"), [("shared", 1, 152565), ("shared", 16, 152992), ("chat", 16, 175040)]
)
def test_ample_pools_have_the_published_sizes(kind: WorkloadKind, page_size: int, slots: int) -> None:
    pools = ample_pools(workload(kind).requests(), page_size=page_size, chunk=3072)
    assert pools == PoolSlots(slots, slots)


def test_fewer_requests_than_groups_use_fewer_groups() -> None:
    few = Workload("groups", 10, num_requests=3, num_groups=8)
    assert few.num_groups_used == 3
    assert len({tuple(request.prompt[:10].tolist()) for request in few.requests()}) == 3


def write_trace(path: Path, requests: list[TraceRequest]) -> Path:
    entries = [
        {
            "id": request.id,
            "prompt": request.prompt.tolist(),
            "output": request.output.tolist(),
            "anchors": list(request.anchors),
        }
        for request in requests
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_a_trace_file_gives_back_what_was_written(tmp_path: Path) -> None:
    written = Workload("chat", 30, num_requests=3, num_turns=2, output_len=5).requests()
    read = read_trace(write_trace(tmp_path / "trace.jsonl", written))
    assert digest(read) == digest(written)
    assert [(one.id, one.anchors) for one in read] == [(one.id, one.anchors) for one in written]


def test_only_the_prompt_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('\n{"prompt": [5, 6]}\n\n{"prompt": [7], "id": 12}\n')
    read = read_trace(path)
    assert [(one.id, one.prompt.tolist(), len(one.output), one.anchors) for one in read] == [
        ("2", [5, 6], 0, ()),
        ("12", [7], 0, ()),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ("[1, 2]", "it is no JSON object"),
        ('{"promt": [1]}', "field 'promt' is unknown"),
        ('{"output": [1]}', "prompt is missing or empty"),
        ('{"prompt": []}', "prompt is missing or empty"),
        ('{"prompt": [1, -2]}', "prompt holds -2; it must be 0 to 2147483647"),
        ('{"prompt": [2147483648]}', "prompt holds 2147483648"),
        ('{"prompt": [1.5]}', "prompt holds something else than whole numbers"),
        ('{"prompt": [true]}', "prompt holds something else than whole numbers"),
        ('{"prompt": "text"}', "prompt is no list"),
        ('{"prompt": [1], "output": [null]}', "output holds something else"),
        ('{"prompt": [1], "anchors": [2]}', "anchors holds 2; it must be 0 to 1"),
        ('{"prompt": [1], "id": [1]}', "id is neither text nor a whole number"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + '\n{"prompt": [1]}\n')
    with pytest.raises(ConfigError, match="line 1") as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_a_file_without_requests_or_none_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
