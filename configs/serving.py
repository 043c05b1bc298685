"""The resolved settings of one server; where each value came from is the command line's business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs. Crosses the process boundary by pickle.

    model_dir: a directory in Hugging Face layout (config.json, *.safetensors).
    None means: decided from the model or from memory when the engine starts.
    full_tokens, swa_tokens: usable slots of each pool; page 0 comes on top.
    rebuild_depth: rebuild only the last so many windows, which is not exact; None: exactly.
    """

    model_dir: Path
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    load_format: str = "auto"
    quantization: str = "none"
    num_threads: int | None = None
    context_length: int | None = None
    page_size: int = 16
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    mem_fraction_static: float | None = None
    full_tokens: int | None = None
    swa_tokens: int | None = None
    swa_full_tokens_ratio: float | None = None
    enable_radix_cache: bool = True
    retention: str = "anchors"
    radix_eviction_policy: str = "cost"
    enable_rebuild: bool = True
    rebuild_depth: int | None = None
    log_level: str = "info"
    log_format: str = "auto"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds for a request that does not say otherwise; by itself OpenAI's. top_k 0: all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the API process needs. api_keys never appear in a log or in show-config.

    allowed_origins: of web pages that may call the server from a browser; ("*",) allows all of them.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    metrics_need_key: bool = True
    has_page: bool = True
    allowed_origins: tuple[str, ...] = ()
    chat_template: Path | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    max_queued_requests: int = 1024
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 32 * 1024 * 1024
    otlp_traces_endpoint: str | None = None
    log_level: str = "info"
    log_format: str = "auto"
