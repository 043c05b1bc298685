"""What was loaded and what fits, told once when the server is ready: a log line, and a block for people."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby

from forkpoint.configs.serving import SamplingDefaults
from forkpoint.configs.start_clock import Stages
from forkpoint.scheduler.messages import EngineInfo

_LINE = "  {:<9} {}"
_KIND_NAMES = {"full": "full attention", "swa": "sliding window"}


def report_fields(info: EngineInfo) -> dict[str, object]:
    """Fields of the log line."""
    pools = {
        f"{kind}_{name}": value
        for kind, num_tokens, bytes_per_token in _pools(info)
        for name, value in (
            ("bytes_per_token", bytes_per_token),
            ("tokens", num_tokens),
            ("pool_bytes", num_tokens * bytes_per_token),
        )
    }
    return {
        "family": info.family,
        "parameters": info.num_parameters,
        "dtype": info.dtype,
        "device": info.device,
        "threads": info.num_threads,
        "attention_backend": info.attention_backend,
        "quantization": info.quantization,
        "weight_bytes": info.weight_bytes,
        "layers": short_pattern(info.layer_pattern),
        "window": info.window,
        "kv_cache_dtype": info.kv_cache_dtype,
        **pools,
        "page_size": info.page_size,
        "context_length": info.context_length,
        "max_running_requests": info.max_running_requests,
        "chunked_prefill_size": info.chunked_prefill_size,
    }


def report_text(info: EngineInfo, defaults: SamplingDefaults) -> str:
    """The same for people, one line for each part; sampling only where it differs from OpenAI's."""
    pattern = info.layer_pattern
    kinds = [f"{pattern.count(letter)} {name}" for letter, name in (("F", "full"), ("S", "sliding"))]
    window = "" if info.window is None else f", window {info.window:,}"
    lines = [
        ("model", f"{info.family}, {info.num_parameters:,} parameters"),
        (
            "weights",
            f"{_size(info.weight_bytes)} in {_weight_form(info)} on {info.device}"
            f"{_threads(info.num_threads)}",
        ),
        ("layers", f"{short_pattern(pattern)} ({' and '.join(kinds)}{window})"),
    ]
    for kind, num_tokens, bytes_per_token in _pools(info):
        lines.append(
            (
                f"KV {kind}",
                f"{num_tokens:,} tokens of {_KIND_NAMES[kind]}, {bytes_per_token:,} bytes each: "
                f"{_size(num_tokens * bytes_per_token)} in {info.kv_cache_dtype}, pages of {info.page_size}",
            )
        )
    lines.append(
        (
            "limits",
            f"context {info.context_length:,} tokens, {info.max_running_requests:,} requests at once, "
            f"{info.chunked_prefill_size:,} tokens a step",
        )
    )
    plain = asdict(SamplingDefaults())
    own = [f"{name} {value:g}" for name, value in asdict(defaults).items() if value != plain[name]]
    if own:
        lines.append(("sampling", f"{', '.join(own)} by default (generation_config.json)"))
    return "\n".join(_LINE.format(name, text) for name, text in lines)


def start_fields(own: Stages, engine: Stages) -> dict[str, object]:
    """Fields of the log line that says where the time of the start went, in seconds.

    own: stages of the API process up to ready; engine: of the engine's, which ran beside the later ones.
    """
    return {
        "ready_s": round(sum(seconds for _, seconds in own), 2),
        "stages": {name: round(seconds, 2) for name, seconds in own},
        "engine_stages": {name: round(seconds, 2) for name, seconds in engine},
    }


def start_text(own: Stages, engine: Stages) -> str:
    """The same for people; stages too short to be seen are left out."""
    lines = [("start", f"ready in {sum(seconds for _, seconds in own):.1f} s: {_stages(own)}")]
    if engine:
        lines.append(
            ("", f"beside it the engine {sum(seconds for _, seconds in engine):.1f} s: {_stages(engine)}")
        )
    return "\n".join(_LINE.format(name, text) for name, text in lines)


def _stages(stages: Stages) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages if seconds >= 0.05)


def _weight_form(info: EngineInfo) -> str:
    return info.dtype if info.quantization == "none" else f"{info.quantization} (computing in {info.dtype})"


def _threads(count: int) -> str:
    return f", {count} thread{'s' * (count > 1)}" if count else ""


def short_pattern(pattern: str) -> str:
    """A layer pattern with its repetitions counted: `SSSSSF x 3`, `SSSF x 8 + SS`, `F x 32`, `F S4 F S5`."""
    for length in range(1, len(pattern) // 2 + 1):
        unit = pattern[:length]
        if (unit * len(pattern)).startswith(pattern):
            count, rest = divmod(len(pattern), length)
            return f"{unit} x {count}" + (f" + {pattern[-rest:]}" if rest else "")
    runs = [(letter, len(list(run))) for letter, run in groupby(pattern)]
    return " ".join(letter if count == 1 else f"{letter}{count}" for letter, count in runs)


def _pools(info: EngineInfo) -> list[tuple[str, int, int]]:
    """Kind, tokens and bytes per token of each pool that the model has."""
    pools = [
        ("full", info.full_tokens, info.full_bytes_per_token),
        ("swa", info.swa_tokens, info.swa_bytes_per_token),
    ]
    return [pool for pool in pools if pool[1]]


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB"
