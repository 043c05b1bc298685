"""Every setting of `forkpoint serve`: its flag, its aliases, its default and its help, in one table.

A setting may also come from the environment (FORKPOINT_PAGE_SIZE) or from a YAML file (page-size: 4); the
command line decides which wins (forkpoint.server.cli_layers). What settings mean to the two processes is in
forkpoint.configs.settings_mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

Auto = Literal["auto"]
# Names in forkpoint.server.parsers.formats, which a test compares.
ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "gemma",
    "functiongemma",
    "json",
    "harmony",
    "gpt-oss",
    "openai",
]
ReasoningParser = Literal[
    "auto", "none", "think", "qwen3", "deepseek_r1", "mistral", "harmony", "gpt-oss", "openai_gptoss"
]

NETWORK = Group.create_ordered("Network")
MODEL = Group.create_ordered("Model")
MEMORY = Group.create_ordered("Memory and batching")
CACHE = Group.create_ordered("Prefix cache")
OPERATION = Group.create_ordered("Operation")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What a person asked for; "auto" is decided from the model, the device or memory at start-up."""

    host: Annotated[str, Parameter(group=NETWORK, help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Parameter(group=NETWORK, help="Port to listen on; 0 takes any free one.")] = 8000
    served_model_name: Annotated[
        tuple[str, ...],
        Parameter(
            group=NETWORK,
            negative="",
            show_default=False,
            help="Name in requests and in /v1/models; repeatable. Default: the last part of MODEL.",
        ),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        Parameter(
            group=NETWORK, negative="", show_default=False, help="Key that requests must carry; repeatable."
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None, Parameter(group=NETWORK, help="File with one API key a line; # begins a comment.")
    ] = None
    metrics_without_key: Annotated[
        bool, Parameter(group=NETWORK, negative="", help="Let scrapers read /metrics without an API key.")
    ] = False
    no_ui: Annotated[bool, Parameter(group=NETWORK, negative="", help="Do not serve the page at /.")] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        Parameter(
            group=NETWORK,
            negative="",
            show_default=False,
            help="Origin (https://example.org) that browsers may call from, or *; repeatable. Default: none.",
        ),
    ] = ()

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Parameter(group=MODEL, help="Where the model runs.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Parameter(group=MODEL, help="Type of weights and activations."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Parameter(group=MODEL, help="Type of cached keys and values; auto: that of the model."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Parameter(
            group=MODEL,
            help="auto: as MODEL is; safetensors: no GGUF; dummy: random weights, for benchmarks.",
        ),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        Parameter(
            group=MODEL,
            help="auto: temperature, top_p, top_k, min_p and repetition_penalty of generation_config.json "
            "are the defaults of requests; none: OpenAI's.",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8"],
        Parameter(group=MODEL, help="Weight-only quantisation; int8 is built, for the CPU."),
    ] = "none"
    attention_backend: Annotated[
        Literal["auto", "torch", "cpu", "flashinfer"],
        Parameter(group=MODEL, help="How attention is computed; torch is the plain reference."),
    ] = "auto"
    threads: Annotated[
        int | Auto,
        Parameter(
            group=MODEL,
            help="Threads that the CPU computes with; auto: one per core that affinity and quota leave.",
        ),
    ] = "auto"
    context_length: Annotated[
        int | Auto,
        Parameter(
            alias="--max-model-len",
            group=MODEL,
            help="Most tokens of prompt and answer; auto: what the model allows.",
        ),
    ] = "auto"
    chat_template: Annotated[
        Path | None, Parameter(group=MODEL, help="Jinja file in place of the model's chat template.")
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser,
        Parameter(group=MODEL, help="How calls of tools are written; auto: as the chat template tells."),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Parameter(group=MODEL, help="How reasoning is set off; auto: as the chat template tells."),
    ] = "auto"
    grammar_backend: Annotated[
        str, Parameter(group=MODEL, help="Engine of structured output; only llguidance can be named.")
    ] = "llguidance"
    tp_size: Annotated[
        int,
        Parameter(
            alias="--tensor-parallel-size", group=MODEL, help="GPUs to share the model; only 1 is built."
        ),
    ] = 1

    page_size: Annotated[
        int, Parameter(alias="--block-size", group=MEMORY, help="Tokens in one page of KV.")
    ] = 16
    max_running_requests: Annotated[
        int | Auto,
        Parameter(alias="--max-num-seqs", group=MEMORY, help="Most sequences that decode together."),
    ] = "auto"
    max_queued_requests: Annotated[
        int, Parameter(group=MEMORY, help="Most requests that wait; beyond it the answer is 429.")
    ] = 1024
    chunked_prefill_size: Annotated[
        int | Auto,
        Parameter(alias="--max-num-batched-tokens", group=MEMORY, help="Most tokens that one step computes."),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        int | Auto, Parameter(group=MEMORY, help="Bytes for both KV pools together.")
    ] = "auto"
    mem_fraction_static: Annotated[
        float | Auto,
        Parameter(
            alias="--gpu-memory-utilization",
            group=MEMORY,
            help="Share of the device's memory for weights and KV pools.",
        ),
    ] = "auto"
    max_total_tokens: Annotated[
        int | Auto, Parameter(group=MEMORY, help="Size of the full pool in tokens.")
    ] = "auto"
    swa_total_tokens: Annotated[
        int | Auto, Parameter(group=MEMORY, help="Size of the sliding-window pool in tokens.")
    ] = "auto"
    swa_full_tokens_ratio: Annotated[
        float | Auto,
        Parameter(group=MEMORY, help="Size of the sliding-window pool as a share of the full pool."),
    ] = "auto"

    disable_radix_cache: Annotated[
        bool, Parameter(group=CACHE, negative="", help="Share no prefixes between requests.")
    ] = False
    retention: Annotated[
        Literal["anchors", "branch", "tail"],
        Parameter(
            group=CACHE,
            help="Which windows are kept. anchors: where a prompt is likely to fork, and where one did; "
            "branch: where one did; tail: at the ends of prompts only.",
        ),
    ] = "anchors"
    radix_eviction_policy: Annotated[
        Literal["cost", "lru"],
        Parameter(group=CACHE, help="Which windows go first: those whose loss costs least, or the oldest."),
    ] = "cost"
    disable_rebuild: Annotated[
        bool,
        Parameter(
            group=CACHE,
            negative="",
            help="Compute the gap below a full hit again instead of its windows only.",
        ),
    ] = False
    rebuild_depth: Annotated[
        int | Literal["exact"],
        Parameter(
            group=CACHE,
            help="Rebuild only so many windows: NOT exact; see `forkpoint measure-rebuild` first.",
        ),
    ] = "exact"

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(group=OPERATION, help="Least important line to log."),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Parameter(group=OPERATION, help="auto: console on a terminal, json otherwise."),
    ] = "auto"
    otlp_traces_endpoint: Annotated[
        str | None,
        Parameter(
            group=OPERATION,
            help="URL that OpenTelemetry traces are sent to (OTLP over HTTP); needs the extra otel.",
        ),
    ] = None
    shutdown_timeout: Annotated[
        float, Parameter(group=OPERATION, help="Seconds that running streams get to finish after SIGTERM.")
    ] = 30.0
