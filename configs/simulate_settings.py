"""Every setting of `forkpoint simulate`: its flag, its default and its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

TRACE = Group.create_ordered("What is replayed")
MODEL = Group.create_ordered("Model and batching")
POOLS = Group.create_ordered("Pools")
POLICY = Group.create_ordered("Policies")
OUTPUT = Group.create_ordered("Output")

WorkloadName = Literal["shared", "groups", "zipf", "fewshot", "chat"]


@dataclass(frozen=True, slots=True)
class SimulateSettings:
    """What a person asked for. None: decided by the other settings, as the help says."""

    trace: Annotated[
        Path | None,
        Parameter(
            group=TRACE,
            help='File of JSON lines {"id", "prompt": [ids], "output": [ids], "anchors": [positions]}.',
        ),
    ] = None
    workload: Annotated[
        WorkloadName | None,
        Parameter(
            group=TRACE,
            help="Built-in requests. shared: one system prompt. groups: several. zipf: one, and questions "
            "that begin alike. fewshot: a common half, then one of several. chat: conversations.",
        ),
    ] = None
    system: Annotated[int, Parameter(group=TRACE, help="Tokens of the system prompt.")] = 2048
    requests: Annotated[
        int | None,
        Parameter(group=TRACE, help="Requests, of chat conversations. Default: 64, of chat 16."),
    ] = None
    groups: Annotated[int, Parameter(group=TRACE, help="System prompts of groups, blocks of fewshot.")] = 8
    turns: Annotated[int, Parameter(group=TRACE, help="Turns of each conversation of chat.")] = 4
    output_len: Annotated[int, Parameter(group=TRACE, help="Tokens of every answer.")] = 64
    seed: Annotated[int, Parameter(group=TRACE, help="Makes other tokens of the same structure.")] = 20260920

    page_size: Annotated[int, Parameter(group=MODEL, help="Tokens in one page of KV.")] = 1
    window: Annotated[int, Parameter(group=MODEL, help="Window of the S layers, with the query itself.")] = (
        128
    )
    layers: Annotated[
        str, Parameter(group=MODEL, help="One letter per layer: S (sliding window) or F (full).")
    ] = "SSSSSF" * 3
    chunk: Annotated[int, Parameter(group=MODEL, help="Most tokens that one step computes.")] = 3072
    concurrency: Annotated[int, Parameter(group=MODEL, help="Most requests that run at a time.")] = 1

    full_slots: Annotated[int | None, Parameter(group=POOLS, help="Size of the full pool in tokens.")] = None
    swa_slots: Annotated[
        int | None, Parameter(group=POOLS, help="Size of the sliding-window pool in tokens.")
    ] = None
    pools: Annotated[
        Literal["ample", "tight"] | None,
        Parameter(
            group=POOLS,
            help="Sizes that are not given. ample (the default): nothing is evicted. tight: what runs and "
            "little more; of built-in workloads only.",
        ),
    ] = None

    retention: Annotated[
        Literal["anchors", "branch", "tail"] | None,
        Parameter(group=POLICY, help="Which windows are kept. Default: anchors."),
    ] = None
    eviction: Annotated[
        Literal["cost", "lru"],
        Parameter(
            group=POLICY, help="What is evicted first: what costs least to lose, or least recently used."
        ),
    ] = "cost"
    no_anchors: Annotated[
        bool, Parameter(group=POLICY, negative="", help="The same as --retention branch.")
    ] = False
    no_branching: Annotated[
        bool, Parameter(group=POLICY, negative="", help="The same as --retention tail.")
    ] = False
    no_rebuild: Annotated[
        bool,
        Parameter(
            group=POLICY, negative="", help="Compute the gap below a full hit again, not its windows only."
        ),
    ] = False

    json: Annotated[
        bool, Parameter(group=OUTPUT, negative="", help="Print JSON, with an entry for each request.")
    ] = False
