"""Requests to replay without a model, and the built-in workloads that make them.

Every token comes from `random.Random(f"{seed}/{label}")`, whose string seeding does not change between
versions of Python, so that a workload is the same on any machine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
WorkloadKind = Literal["shared", "groups", "zipf", "fewshot", "chat"]
WORKLOAD_KINDS: tuple[WorkloadKind, ...] = get_args(WorkloadKind)

FIRST_TOKEN, END_TOKEN = 1000, 1 << 20
# Words of the Zipf vocabulary lie above all other tokens: most frequent first.
ZIPF_FIRST, ZIPF_WORDS, ZIPF_EXPONENT = 2_000_000, 512, 1.1
# What a question adds to its prompt, in tokens, both ends included.
MIN_QUESTION, MAX_QUESTION = 64, 256
# The generation header that closes every chat prompt; the next turn renders it differently, so it is lost.
HEADER = (11, 12, 13, 14)


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request. prompt: [n] n >= 1. output: what is sampled for it; the last one is never computed.

    anchors: positions in [0, n] where a later prompt is likely to fork.
    """

    id: str
    prompt: Tokens
    output: Tokens
    anchors: tuple[int, ...] = ()

    @property
    def computed_tokens(self) -> Tokens:
        """The tokens whose state is computed in the end: all but the last of the output."""
        return np.concatenate([self.prompt, self.output[:-1]])


@dataclass(frozen=True, slots=True)
class Workload:
    """A built-in workload.

    shared   one system prompt, then a question of its own for each request
    groups   several system prompts in shuffled order, then a question
    zipf     as shared, but questions begin alike by accident, since their words are few
    fewshot  half of the system prompt is common, the other half is one of several blocks, then a question
    chat     conversations on one system prompt, all first turns first; a turn's prompt is the last one
             without its generation header, the answer, and a new message

    num_requests: for chat, conversations. system_len: tokens. num_groups: of groups and fewshot.
    num_turns: of chat. output_len: tokens of every answer.
    """

    kind: WorkloadKind
    system_len: int = 2048
    num_requests: int = 64
    num_groups: int = 8
    num_turns: int = 4
    output_len: int = 64
    seed: int = 20260920

    @property
    def num_groups_used(self) -> int:
        """How many system prompts, or blocks after a common half, occur."""
        return min(self.num_groups, self.num_requests) if self.kind in ("groups", "fewshot") else 1

    def requests(self) -> list[TraceRequest]:
        """The requests, in order of arrival."""
        return list(_MAKERS[self.kind](_Source(self)))


def digest(requests: Sequence[TraceRequest]) -> str:
    """16 hex digits that stand for the prompts and outputs of a trace."""
    sha = hashlib.sha256()
    for request in requests:
        for tokens, end in ((request.prompt, b"|"), (request.output, b"\n")):
            sha.update(tokens.astype("<i8").tobytes())
            sha.update(end)
    return sha.hexdigest()[:16]


class _Source:
    """The random streams of one workload. Mutable: question lengths are drawn in the order of requests."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._lengths = self._stream("ulen")

    def _stream(self, label: str) -> random.Random:
        return random.Random(f"{self.workload.seed}/{label}")

    def tokens(self, label: str, count: int) -> Tokens:
        draw = self._stream(label).randrange
        return np.array([draw(FIRST_TOKEN, END_TOKEN) for _ in range(count)], dtype=np.int32)

    def words(self, label: str, count: int) -> Tokens:
        weights = [1.0 / (rank + 1) ** ZIPF_EXPONENT for rank in range(ZIPF_WORDS)]
        ranks = self._stream(label).choices(range(ZIPF_WORDS), weights=weights, k=count)
        return np.array(ranks, dtype=np.int32) + ZIPF_FIRST

    def question_len(self) -> int:
        return self._lengths.randint(MIN_QUESTION, MAX_QUESTION)

    def output(self, label: str) -> Tokens:
        return self.tokens(f"o{label}", self.workload.output_len)

    def group_order(self) -> list[int]:
        order = [index % self.workload.num_groups for index in range(self.workload.num_requests)]
        self._stream("order").shuffle(order)
        return order


def _shared(source: _Source) -> Iterator[TraceRequest]:
    system = source.tokens("sys0", source.workload.system_len)
    make = source.words if source.workload.kind == "zipf" else source.tokens
    for index in range(source.workload.num_requests):
        question = make(f"u{index}", source.question_len())
        yield _request(index, [system, question], source.output(str(index)))


def _groups(source: _Source) -> Iterator[TraceRequest]:
    workload = source.workload
    systems = [source.tokens(f"sys{group}", workload.system_len) for group in range(workload.num_groups_used)]
    for index, group in enumerate(source.group_order()):
        question = source.tokens(f"u{index}", source.question_len())
        yield _request(index, [systems[group], question], source.output(str(index)))


def _fewshot(source: _Source) -> Iterator[TraceRequest]:
    workload = source.workload
    common_len = workload.system_len // 2
    block_len = workload.system_len - common_len
    common = source.tokens("sys0", common_len)
    blocks = [source.tokens(f"blk{group}", block_len) for group in range(workload.num_groups_used)]
    for index, group in enumerate(source.group_order()):
        question = source.tokens(f"u{index}", source.question_len())
        yield _request(index, [common, blocks[group], question], source.output(str(index)))


def _chat(source: _Source) -> Iterator[TraceRequest]:
    workload = source.workload
    system = source.tokens("sys0", workload.system_len)
    histories: list[list[Tokens]] = [[system] for _ in range(workload.num_requests)]
    header = np.array(HEADER, dtype=np.int32)
    for turn in range(workload.num_turns):
        for conversation, history in enumerate(histories):
            label = f"{conversation}.{turn}"
            history.append(source.tokens(f"u{label}", source.question_len()))
            output = source.output(label)
            yield _request(turn * workload.num_requests + conversation, [*history, header], output)
            history.append(output)


def _request(index: int, parts: Sequence[Tokens], output: Tokens) -> TraceRequest:
    """A prompt made of parts; all but the last end at an anchor."""
    ends = np.cumsum([len(part) for part in parts[:-1]])
    return TraceRequest(str(index), np.concatenate(parts), output, tuple(int(end) for end in ends))


_MAKERS = {"shared": _shared, "zipf": _shared, "groups": _groups, "fewshot": _fewshot, "chat": _chat}
