"""`forkpoint measure-rebuild`: how far --rebuild-depth K is from exact on a model, and what it saves."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from rich.console import Console

from forkpoint.configs.errors import ConfigError
from forkpoint.configs.measure_settings import DEFAULT_DEPTHS, MeasureSettings
from forkpoint.server.cli_layers import CACHE_VARIABLE
from forkpoint.server.cli_measure_text import sample_token_ids
from forkpoint.server.cli_progress import StartupProgress, startup_progress
from forkpoint.server.cli_report import plain_console, plain_table
from forkpoint.server.text import Tokenizer

if TYPE_CHECKING:
    from forkpoint.scheduler.measure_rebuild import RebuildMeasurement

# A page of tokens follows the hit: see forkpoint.scheduler.rebuild_probe.
TOKENS_AFTER = 16


def measure(model: str, settings: MeasureSettings) -> int:
    """Print what each depth costs on MODEL. Raises ConfigError or ModelLoadError, as `serve` does."""
    _check(settings)
    with contextlib.closing(startup_progress()) as progress:
        measurement = _measure(model, settings, progress)
    if settings.as_json:
        print(orjson.dumps(asdict(measurement), option=orjson.OPT_INDENT_2).decode())
    else:
        _print_table(measurement, plain_console())
    return 0


def _check(settings: MeasureSettings) -> None:
    for depth in settings.depth:
        if depth != "exact" and depth < 1:
            raise ConfigError(f"--depth is {depth}; it must be 1 or more, or exact", hint="change --depth")
    if settings.tokens < TOKENS_AFTER:
        raise ConfigError(
            f"--tokens is {settings.tokens}; it must be {TOKENS_AFTER} or more", hint="change --tokens"
        )


def _measure(model: str, settings: MeasureSettings, progress: StartupProgress) -> RebuildMeasurement:
    from forkpoint.model.device import set_num_threads
    from forkpoint.model.load import load_model
    from forkpoint.model.resolve import default_cache_dir, resolve_model
    from forkpoint.scheduler.measure_rebuild import measure_rebuild

    own_cache = os.environ.get(CACHE_VARIABLE)
    cache_dir = Path(own_cache).expanduser() if own_cache else default_cache_dir(dict(os.environ))
    model_dir = resolve_model(model, cache_dir=cache_dir, progress=progress.show, notice=progress.note)
    token_ids = _token_ids(Tokenizer.load(model_dir), settings)
    set_num_threads()
    loaded = load_model(
        model_dir,
        dtype=settings.dtype,
        device=settings.device,
        progress=lambda done, total: progress.show("loading weights", done, total),
    )
    depths = [None if depth == "exact" else depth for depth in settings.depth or DEFAULT_DEPTHS]
    return measure_rebuild(
        loaded,
        token_ids,
        depths,
        num_tokens=settings.tokens,
        notice=lambda text: progress.note(f"{text} ..."),
    )


def _token_ids(tokenizer: Tokenizer, settings: MeasureSettings) -> list[int]:
    wanted = settings.tokens + TOKENS_AFTER
    if settings.text is None:
        return sample_token_ids(tokenizer, wanted)
    try:
        text = settings.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--text {settings.text} cannot be read: {error}", hint="give a UTF-8 text file"
        ) from error
    ids = tokenizer.encode(text)
    if len(ids) < wanted:
        raise ConfigError(
            f"--text {settings.text} has {len(ids)} tokens; a hit of {settings.tokens} needs {wanted}",
            hint=f"give a longer text, or --tokens {max(TOKENS_AFTER, len(ids) - TOKENS_AFTER)}",
        )
    return [int(token) for token in ids[:wanted]]


def _print_table(found: RebuildMeasurement, console: Console) -> None:
    console.print(
        f"full hit of {found.num_tokens} tokens without windows; {found.num_swa_layers} sliding-window layers"
        f" of {found.window}; {found.dtype} on {found.device}; first token of a cold run {found.cold_s:.2f} s"
    )
    table = plain_table(
        "--rebuild-depth",
        "starts at",
        "logits: max error",
        "mean error",
        "greedy tokens equal",
        "time",
        "of cold",
    )
    for error in found.errors:
        table.add_row(
            "exact" if error.depth is None else str(error.depth),
            str(error.first_row),
            f"{error.max_error:.2g}",
            f"{error.mean_error:.2g}",
            f"{error.equal_tokens} of {found.num_new}",
            f"{error.first_token_s:.2f} s",
            f"{error.first_token_s / found.cold_s:.0%}",
        )
    console.print(table)
