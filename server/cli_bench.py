"""`forkpoint bench`: a load test against any OpenAI-compatible server, as a table, JSON and a picture."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forkpoint.configs.bench_settings import BenchSettings
from forkpoint.configs.errors import ConfigError, RemoteError
from forkpoint.server.bench.load import Load, Run
from forkpoint.server.bench.plot import check_plot, write_plot
from forkpoint.server.bench.record import RequestRecord
from forkpoint.server.bench.report import Figures, Report, make_report, percentile
from forkpoint.server.bench.target import Target
from forkpoint.server.bench.wire import WireClient
from forkpoint.server.bench.workload import Conversation, arrival_times, make_conversations
from forkpoint.server.chat_client import server_url
from forkpoint.server.cli_key import read_api_key
from forkpoint.server.cli_report import plain_table

DEFAULT_CONCURRENCY = 8
INTERRUPTED = 130

_COUNTS = ("question_tokens", "output_tokens", "num_prompts", "num_prefixes", "turns")
_AT_LEAST_0 = ("system_tokens", "warmup_requests", "zipf", "temperature")


def run_bench(settings: BenchSettings) -> int:
    """Run it and print; exit status 1 if every request failed. Raises ConfigError, RemoteError."""
    _check(settings)
    key = read_api_key(settings.api_key, settings.api_key_file)
    settings = dataclasses.replace(settings, base_url=server_url(settings.base_url), api_key=None)
    outcome = uvloop.run(_measure(settings, key))
    report = make_report(outcome.run.records, outcome.run.lags_s)
    # With the JSON on standard output, what people read goes to the other one.
    people = Console(
        stderr=settings.json == "-", width=None if sys.stdout.isatty() else 120, highlight=False, markup=False
    )
    _print_report(people, report, outcome)
    if settings.json is not None:
        _write_json(settings.json, _as_json(settings, report, outcome))
    if settings.plot is not None:
        write_plot(settings.plot, outcome.run.records, _title(settings, outcome.model))
        people.print(f"picture: {settings.plot}")
    if outcome.run.was_stopped:
        return INTERRUPTED
    return 0 if report.figures["completed"] else 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """model: as asked. date_s: Unix time of the begin."""

    model: str
    notes: tuple[str, ...]
    run: Run
    date_s: float


async def _measure(settings: BenchSettings, key: str | None) -> _Outcome:
    wire = WireClient(settings.base_url, api_key=key)
    try:
        target = await Target.connect(wire, settings)
        texts = await target.texts()
        conversations = await make_conversations(settings, texts)
        if not texts.is_exact:
            target.notes.append("some prompts could not be made exactly as long as asked for")
        if settings.flush_cache:
            await target.flush_cache()
        total = sum(len(each.questions) for each in conversations)
        with _Live(total) as live:
            load = Load(target, settings.output_tokens, on_record=live.add)
            date_s = time.time()
            await _stoppable(_run(load, settings, conversations))
        return _Outcome(target.model, tuple(target.notes), load.run, date_s)
    finally:
        wire.close()


async def _run(load: Load, settings: BenchSettings, conversations: Sequence[Conversation]) -> None:
    warmup = [each for each in conversations if each.is_warmup]
    measured = [each for each in conversations if not each.is_warmup]
    concurrency = settings.concurrency
    if concurrency is None and settings.request_rate is None:
        concurrency = DEFAULT_CONCURRENCY
    if warmup:
        await load.closed(warmup, concurrency or DEFAULT_CONCURRENCY)
    if settings.request_rate is None:
        assert concurrency is not None
        await load.closed(measured, concurrency)
        return
    arrivals = arrival_times(settings.request_rate, settings.burstiness, len(measured), settings.seed)
    await load.open(measured, arrivals, concurrency)


async def _stoppable(work: Coroutine[Any, Any, None]) -> None:
    """Ctrl-C ends the load, not the program: what was measured is still told."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Live:
    """A bar with the figures so far, where there is a terminal to show it. Mutable."""

    def __init__(self, total: int) -> None:
        self._progress = Progress(
            TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True), disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total)
        self._ttfts_s: list[float] = []
        self._num_failed = 0

    def __enter__(self) -> _Live:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, record: RequestRecord) -> None:
        self._num_failed += record.has_failed
        if record.answer.ttft_s is not None and not record.has_failed:
            self._ttfts_s.append(record.answer.ttft_s)
        told = f"median TTFT {1e3 * percentile(self._ttfts_s, 50):,.0f} ms" if self._ttfts_s else ""
        if self._num_failed:
            told += f", {self._num_failed} failed"
        self._progress.update(self._task, advance=1, description=told)


def _check(settings: BenchSettings) -> None:
    for name in _COUNTS:
        _require(getattr(settings, name) >= 1, name, settings, "must be at least 1")
    for name in _AT_LEAST_0:
        _require(getattr(settings, name) >= 0, name, settings, "must not be negative")
    _require(settings.timeout_s > 0, "timeout_s", settings, "must be above 0")
    _require(settings.burstiness > 0, "burstiness", settings, "must be above 0")
    _require(
        settings.concurrency is None or settings.concurrency >= 1,
        "concurrency",
        settings,
        "must be at least 1",
    )
    _require(
        settings.request_rate is None or settings.request_rate > 0,
        "request_rate",
        settings,
        "must be above 0",
    )
    if settings.plot is not None:
        check_plot(settings.plot)
    if settings.json not in (None, "-") and not Path(str(settings.json)).absolute().parent.is_dir():
        raise ConfigError(
            f"--json {settings.json}: there is no such folder", hint="make it, or name another one"
        )


def _require(holds: bool, name: str, settings: BenchSettings, rule: str) -> None:
    if not holds:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} is {getattr(settings, name)}; it {rule}", hint=f"change {flag}")


def _print_report(console: Console, report: Report, outcome: _Outcome) -> None:
    figures = report.figures
    table = plain_table("", "")
    table.show_header = False
    for label, name, unit in (
        ("completed", "completed", ""), ("failed", "failed", ""), ("duration", "duration", "s"),
        ("requests", "request_throughput", "/s"), ("output tokens", "output_throughput", "/s"),
        ("prompt + output tokens", "total_token_throughput", "/s"),
        ("prompt tokens", "prompt_tokens", ""), ("from the cache", "cached_tokens", ""),
    ):  # fmt: skip
        table.add_row(label, _number(figures[name], unit))
    rate = figures["token_hit_rate"]
    table.add_row("token hit rate", "the server does not say" if rate is None else f"{100 * rate:.1f} %")
    console.print(table)
    console.print()
    times = plain_table("ms", "mean", "median", "p90", "p99", "std")
    for label, name in (
        ("time to first token", "ttft"), ("time per token after it", "tpot"),
        ("inter-token latency", "itl"), ("whole answer", "e2el"),
    ):  # fmt: skip
        parts = [
            _number(figures[f"{part}_{name}_ms"], "") for part in ("mean", "median", "p90", "p99", "std")
        ]
        times.add_row(label, *parts)
    console.print(times)
    for note in outcome.notes:
        console.print(f"note: {note}")
    lag = figures["client_lag_ms"]
    if lag is not None and lag > 5:
        console.print(f"note: this client was up to {lag:.0f} ms late itself (p99); the latencies hold that")
    for message, count in report.errors:
        console.print(f"failed {count} times: {message}")
    if outcome.run.was_stopped:
        console.print("note: stopped before the end")


def _number(value: float | int | None, unit: str) -> str:
    if value is None:
        return "-"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
    return f"{text} {unit}".rstrip()


def _as_json(settings: BenchSettings, report: Report, outcome: _Outcome) -> dict[str, object]:
    figures: Figures = report.figures
    return {
        "date": outcome.date_s,
        "model": outcome.model,
        **figures,
        "was_stopped": outcome.run.was_stopped,
        "notes": outcome.notes,
        "errors": [{"message": message, "count": count} for message, count in report.errors],
        "settings": {
            field.name: _plain(getattr(settings, field.name))
            for field in dataclasses.fields(settings)
            if field.name not in ("api_key", "api_key_file")
        },
        "requests": [_request_json(record) for record in outcome.run.records],
    }


def _request_json(record: RequestRecord) -> dict[str, object]:
    answer = record.answer
    return {
        "conversation": record.conversation,
        "turn": record.turn,
        "prefix": record.prefix,
        "is_warmup": record.is_warmup,
        "start_s": record.start_s,
        "lag_s": record.lag_s,
        "ttft_s": answer.ttft_s,
        "e2el_s": answer.last_s,
        "itls_s": answer.itls_s,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "output_is_counted": answer.is_counted,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
    }


def _plain(value: object) -> object:
    if isinstance(value, float) and value == float("inf"):
        return "inf"
    return str(value) if isinstance(value, Path) else value


def _write_json(target: str, content: dict[str, object]) -> None:
    data = orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"
    if target == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise RemoteError(f"--json {target} cannot be written: {error.strerror}") from error


def _title(settings: BenchSettings, model: str) -> str:
    rate = f"{settings.request_rate:g} requests/s" if settings.request_rate is not None else None
    load = rate or f"{settings.concurrency or DEFAULT_CONCURRENCY} at a time"
    asked = f"{settings.question_tokens} + {settings.output_tokens} tokens"
    shared = "" if settings.workload == "random" else f", system prompts of {settings.system_tokens}"
    return f"{model}: {settings.workload}, {settings.num_prompts} prompts of {asked}{shared}, {load}"
