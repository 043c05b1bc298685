"""All that crosses the pipe between the API process and the engine process: frozen, pickled.

What crosses in each step is tuples of plain numbers: a frozen dataclass takes three times as long to make,
to pickle and to load, and so does an array of as many numbers as a step samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache.description import TreeDescription
from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.start_clock import Stages

# By this name too: the server sees nothing of the model but what crosses the pipe.
from forkpoint.model.outputs import TokenLogprobs as TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]

_NO_LOGPROBS: Mapping[int, TokenLogprobs] = {}


# ---- API process -> engine process


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence to generate. uid is unique for the life of the API process.

    token_ids: [n] int32, n >= 1, all in the vocabulary. choice: index among the n choices of a request.
    namespace: requests of different namespaces never share cached state.
    """

    uid: int
    token_ids: NDArray[np.int32]
    params: SamplingParams
    choice: int = 0
    namespace: str = ""
    anchors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up a sequence wherever it is; unknown uids are ignored. It ends with Finish(reason="abort")."""

    uid: int


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Empty the prefix cache; answered by FlushDone. Refused (cleared=False) while sequences run or wait."""

    ticket: int


@dataclass(frozen=True, slots=True)
class DescribeCache:
    """Tell what the prefix cache holds, at most max_nodes nodes of it; answered by CacheDescribed."""

    ticket: int
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine process after the current step."""


ToEngine = Submit | Abort | FlushCache | DescribeCache | Shutdown


# ---- engine process -> API process


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the server tells about itself; sent once with Ready.

    full_tokens, swa_tokens: usable slots (0 where the model lacks the kind). window: W, counts the query.
    full_bytes_per_token, swa_bytes_per_token: what one slot takes, over all layers of the kind.
    num_threads: that compute on the CPU; 0 where something else does.
    """

    context_length: int
    vocab_size: int
    page_size: int
    full_tokens: int
    swa_tokens: int
    window: int | None
    margin: int
    max_running_requests: int
    chunked_prefill_size: int
    dtype: str
    device: str
    attention_backend: str
    layer_pattern: str
    num_parameters: int
    num_threads: int = 0
    family: str = ""
    weight_bytes: int = 0
    quantization: str = "none"
    kv_cache_dtype: str = ""
    full_bytes_per_token: int = 0
    swa_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step of start-up, for the progress bar: done of total units of `what`."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Requests are served from now on. stages: what the engine's process spent its start on."""

    info: EngineInfo
    stages: Stages = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence was admitted. cached_tokens: prompt tokens whose prefill is skipped (at most n - 1).

    Sent again, with the same queue_time_s, when the prefill takes over what a neighbour computed meanwhile.
    """

    uid: int
    cached_tokens: int
    rebuilt_tokens: int
    queue_time_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """A sequence ended. reason `error` carries a message; every Submit ends in exactly one Finish.

    is_own_fault: the request asked for what cannot be done, so that it would fail again.
    """

    uid: int
    reason: FinishReason
    stop_token_id: int | None = None
    message: str | None = None
    is_own_fault: bool = False


class PoolStats(NamedTuple):
    """Slots of one kind. tree includes locked ones; leased are owned by running sequences."""

    free: int = 0
    tree: int = 0
    locked: int = 0
    leased: int = 0
    capacity: int = 0


class EngineStats(NamedTuple):
    """Gauges as of now, and counters since the engine started (monotonic within one engine)."""

    running: int = 0
    waiting: int = 0
    full: PoolStats = PoolStats()
    swa: PoolStats = PoolStats()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rebuilt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0
    evicted_full_slots: int = 0
    evicted_swa_slots: int = 0
    windows_kept: int = 0
    windows_evicted: int = 0
    windows_rebuilt: int = 0
    branch_points_found: int = 0
    branch_points_kept: int = 0
    branch_points_hit: int = 0
    retractions: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a sequence's prompt tokens from position `start` on (its first token has none).

    Comes in pieces, in order, all of them before or with the sequence's first token or its Finish.
    """

    uid: int
    start: int
    logprobs: TokenLogprobs


class StepTokens(NamedTuple):
    """What one step did, in columns: tokens[i] was sampled for uids[i] (at most one per uid).

    logprobs: by uid, of the sampled token of each sequence that asked for them (N = 1).
    num_rebuild_rows: of the prefill rows, those whose full KV was cached.
    A sequence's first Started comes with or before its first token, its Finish with or after its last.
    """

    uids: Sequence[int]
    tokens: Sequence[int]
    started: tuple[Started, ...] = ()
    finished: tuple[Finish, ...] = ()
    stats: EngineStats = EngineStats()
    step_s: float = 0.0
    num_prefill_rows: int = 0
    num_rebuild_rows: int = 0
    num_decode_rows: int = 0
    logprobs: Mapping[int, TokenLogprobs] = _NO_LOGPROBS
    prompt_scores: tuple[PromptScores, ...] = ()


@dataclass(frozen=True, slots=True)
class FlushDone:
    ticket: int
    cleared: bool
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class CacheDescribed:
    """stats: of the same moment, for the pools."""

    ticket: int
    tree: TreeDescription
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on (load error, device lost); the process ends after this."""

    message: str
    hint: str | None = None


FromEngine = LoadProgress | Ready | StepTokens | FlushDone | CacheDescribed | Failed
