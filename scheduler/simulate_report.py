"""What a simulation tells: totals of a trace, and one entry per request. Field names are an interface."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Tokens of one prompt: prompt_tokens = cached + rebuilt + computed.

    full_hit, resume: F and R when the request was first admitted. What it took over from a neighbour later is
    part of cached and rebuilt.
    """

    id: str
    prompt_tokens: int
    full_hit: int
    resume: int
    cached: int
    rebuilt: int
    computed: int


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Totals of a trace. Tokens, percentages of prompt tokens, and slots; page 0 is never counted.

    served: cached and rebuilt. ideal: the longest prefix that each prompt shares with any earlier request.
    recomputed_tokens: work repeated after retraction. row_layers: attention and MLP rows of prompts, summed
    over the layers; decode rows not counted, repeated work is. row_layers_ideal: were the ideal cached;
    row_layers_nocache: were nothing. peak: most slots that running requests owned or locked.
    """

    prompt_tokens: int
    served_tokens: int
    served_pct: float
    ideal_pct: float
    computed_tokens: int
    rebuilt_tokens: int
    recomputed_tokens: int
    row_layers: int
    row_layers_ideal: int
    row_layers_nocache: int
    peak_full_slots: int
    peak_swa_slots: int
    evicted_full_slots: int
    evicted_swa_slots: int
    retractions: int
    leaked_slots: int
    requests: tuple[RequestReport, ...]
