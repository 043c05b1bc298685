"""`forkpoint simulate`: replays a trace without a model and prints what the cache did with it."""

from __future__ import annotations

import dataclasses
import sys

import orjson
from rich.console import Console
from rich.table import Table

from forkpoint.configs.errors import ConfigError
from forkpoint.configs.simulate_settings import SimulateSettings
from forkpoint.scheduler.simulate import SimulationSetup, simulate
from forkpoint.scheduler.simulate_report import SimulationReport
from forkpoint.scheduler.trace_file import read_trace
from forkpoint.scheduler.trace_pools import PoolSlots, ample_pools, tight_pools
from forkpoint.scheduler.traces import TraceRequest, Workload

CONVERSATIONS, REQUESTS = 16, 64
# Settings that must be 1 or more.
COUNTS = (
    "system",
    "requests",
    "groups",
    "turns",
    "output_len",
    "page_size",
    "window",
    "chunk",
    "concurrency",
    "full_slots",
    "swa_slots",
)
# Each keeps what the next one keeps, and more.
RETENTION_BY_WORTH = ("anchors", "branch", "tail")


def print_simulation(settings: SimulateSettings) -> int:
    """Simulate and print; returns the exit status. Raises ConfigError for what the user can put right."""
    _check(settings)
    workload = _workload(settings) if settings.workload is not None else None
    if workload is not None:
        requests = workload.requests()
    else:
        assert settings.trace is not None
        requests = read_trace(settings.trace)
    setup = SimulationSetup(
        slots=_slots(settings, requests, workload),
        page_size=settings.page_size,
        window=settings.window,
        layers=settings.layers,
        chunk=settings.chunk,
        concurrency=settings.concurrency,
        retention=_retention(settings),
        eviction=settings.eviction,
        rebuilds=not settings.no_rebuild,
    )
    report = simulate(requests, setup)
    if settings.json:
        sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _print_tables(report, setup)
    return 0


# ---- what is wrong


def _check(settings: SimulateSettings) -> None:
    if (settings.trace is None) == (settings.workload is None):
        given = (
            "neither --trace nor --workload is" if settings.trace is None else "--trace and --workload are"
        )
        raise ConfigError(f"{given} given", hint="give one of them")
    strangers = sorted(set(settings.layers) - set("SF"))
    if strangers or not settings.layers:
        found = f"holds {strangers[0]!r}" if strangers else "is empty"
        raise ConfigError(
            f"--layers {found}; it is one letter per layer, S or F", hint="write it like --layers SSSSSF"
        )
    for name in COUNTS:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(
                f"{_flag(name)} is {value}; it must be at least 1", hint=f"change {_flag(name)}"
            )
    if settings.pools == "tight" and settings.workload is None:
        raise ConfigError(
            "--pools tight is defined for built-in workloads only", hint="give --full-slots and --swa-slots"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _retention(settings: SimulateSettings) -> str:
    """The policy that --retention, --no-anchors and --no-branching agree on."""
    flag, best = None, "anchors"
    if settings.no_branching:
        flag, best = "--no-branching", "tail"
    elif settings.no_anchors:
        flag, best = "--no-anchors", "branch"
    chosen = settings.retention or best
    if RETENTION_BY_WORTH.index(chosen) < RETENTION_BY_WORTH.index(best):
        raise ConfigError(f"{flag} contradicts --retention {chosen}", hint="give one of them")
    return chosen


# ---- what is simulated


def _workload(settings: SimulateSettings) -> Workload:
    assert settings.workload is not None
    default_requests = CONVERSATIONS if settings.workload == "chat" else REQUESTS
    return Workload(
        settings.workload,
        system_len=settings.system,
        num_requests=settings.requests or default_requests,
        num_groups=settings.groups,
        num_turns=settings.turns,
        output_len=settings.output_len,
        seed=settings.seed,
    )


def _slots(settings: SimulateSettings, requests: list[TraceRequest], workload: Workload | None) -> PoolSlots:
    """Sizes as given, the rest by --pools."""
    if settings.pools == "tight":
        assert workload is not None
        sizes = tight_pools(
            workload,
            page_size=settings.page_size,
            window=settings.window,
            chunk=settings.chunk,
            concurrency=settings.concurrency,
        )
    else:
        sizes = ample_pools(requests, page_size=settings.page_size, chunk=settings.chunk)
    return PoolSlots(settings.full_slots or sizes.full, settings.swa_slots or sizes.swa)


# ---- what is printed


def _print_tables(report: SimulationReport, setup: SimulationSetup) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    console.print(_setup_line(setup), style="dim", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, value, note in _rows(report):
        table.add_row(name, value, note)
    console.print(table)


def _setup_line(setup: SimulationSetup) -> str:
    geometry = setup.geometry
    window = "none" if geometry.window is None else str(geometry.window)
    size = setup.page_size
    return (
        f"layers {setup.layers}, window {window}, page {size}, chunk {setup.chunk}, "
        f"concurrency {setup.concurrency}, full slots {setup.full_pages * size}, "
        f"SWA slots {setup.swa_pages * size}, retention {setup.retention}, eviction {setup.eviction}, "
        f"rebuild {'on' if setup.rebuilds else 'off'}"
    )


def _rows(report: SimulationReport) -> list[tuple[str, str, str]]:
    ratio = report.row_layers / report.row_layers_ideal
    share = 100 * report.row_layers / report.row_layers_nocache
    notes = {
        "prompt_tokens": f"in {len(report.requests)} requests",
        "served_pct": "of the prompt tokens: cached or rebuilt",
        "ideal_pct": "were everything kept for ever",
        "rebuilt_tokens": "their windows were lost and are run again, in the lower layers only",
        "recomputed_tokens": "work repeated after a retraction",
        "row_layers": f"{ratio:.2f} times the ideal, {share:.1f} % of the work without a cache",
        "peak_full_slots": "most that running requests owned or locked",
        "leaked_slots": "must be 0",
    }
    rows = []
    for field in dataclasses.fields(report):
        value = getattr(report, field.name)
        if field.name != "requests":
            shown = f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
            rows.append((field.name, shown, notes.get(field.name, "")))
    return rows
