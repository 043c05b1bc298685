"""`forkpoint top`: what a running server does, live in the terminal; the figures of the page at `/`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forkpoint.configs.errors import ConfigError, RemoteError
from forkpoint.configs.top_settings import TopSettings
from forkpoint.server.chat_client import ChatClient
from forkpoint.server.cli_key import read_api_key
from forkpoint.server.cli_report import plain_table
from forkpoint.server.live_figures import LiveFigures, Look, Reuse, live_figures

_BAR_WIDTH = 40
_SHOWN_REQUESTS = 12
# A letter each beside the colours: they must be told apart without any.
_POOL_PARTS = (
    ("leased", "#", "blue", "running requests"),
    ("tree", "=", "cyan", "cached"),
    ("free", ".", "dim", "free"),
)
_REUSE_PARTS = (("cached", "=", "blue"), ("rebuilt", "~", "yellow"), ("computed", "#", "red"))


def show_top(settings: TopSettings, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show until Ctrl-C; with --once, or without a terminal, print one picture. Raises RemoteError."""
    if not settings.interval > 0:
        raise ConfigError(f"--interval is {settings.interval}; it must be above 0", hint="change --interval")
    with closing(
        ChatClient(settings.url, api_key=read_api_key(settings.api_key, settings.api_key_file))
    ) as client:
        server = _Server(client)
        before = server.look(0)
        if settings.once or not sys.stdout.isatty():
            sleep(settings.interval)
            console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
            console.print(_picture(server, before, server.look(before["last"])))
            return 0
        return _show_live(server, before, settings.interval, sleep)


def _show_live(server: _Server, before: Look, interval_s: float, sleep: Callable[[float], None]) -> int:
    with Live(Text("looking…"), screen=True, auto_refresh=False) as live:
        while True:
            try:
                sleep(interval_s)
                after = server.look(before["last"])
                live.update(_picture(server, before, after), refresh=True)
                before = after
            except RemoteError as error:
                live.update(Text(f"{server.url}: {error}\nlooking again; Ctrl-C ends"), refresh=True)
            except KeyboardInterrupt:
                return 0


@dataclass(slots=True)
class _Server:
    """One Forkpoint server. Mutable: keeps what it said of itself."""

    client: ChatClient
    info: Mapping[str, Any] | None = None

    @property
    def url(self) -> str:
        return self.client.url

    def look(self, after: int) -> Look:
        """Raises RemoteError, also for a server that is none of ours."""
        if self.info is None:
            self.info = self.client.read("/server_info")
        looked: Look = self.client.read(f"/debug/steps?after={after}")
        if looked["last"] < after:  # it was started again: its numbers begin anew
            self.info = self.client.read("/server_info")
        return looked

    def requests(self) -> Mapping[str, Any]:
        listed: Mapping[str, Any] = self.client.read("/debug/requests")
        return listed


def _picture(server: _Server, before: Look, after: Look) -> Group:
    assert server.info is not None
    # What counted down was started again in between.
    figures = live_figures(before if before["last"] <= after["last"] else after, after)
    name = server.info["served_model_names"][0]
    state = f"{after['state']}, {after['running']} running, {after['waiting']} waiting"
    return Group(
        Text(f"{name} on {server.url}: {state}", style="bold"),
        Text(),
        _speeds(figures),
        Text(),
        _reuse(figures),
        Text(),
        _pools(server.info, after),
        Text(),
        _requests(server.requests()),
    )


def _speeds(figures: LiveFigures) -> Table:
    table = plain_table("tokens/s", "steps", "rows since the last look")
    step = "none"
    if figures.step_ms is not None and figures.longest_step_ms is not None:
        step = f"{figures.step_ms:,.1f} ms in the middle, {figures.longest_step_ms:,.1f} at most"
    prefill, rebuild, decode = figures.rows
    table.add_row(
        f"prompts {figures.prompt_rate:,.1f}, answers {figures.answer_rate:,.1f}",
        step,
        f"{prefill:,} prompt, {rebuild:,} rebuild, {decode:,} decode",
    )
    return table


def _reuse(figures: LiveFigures) -> Table:
    table = plain_table("prompt tokens", "", "reused", "cached =", "rebuilt ~", "computed #")
    for label, reuse in (("now", figures.recent), ("since the start", figures.overall)):
        table.add_row(label, _reuse_bar(reuse), _percent(reuse.share), *(
            f"{getattr(reuse, part):,}" for part, _, _ in _REUSE_PARTS
        ))  # fmt: skip
    return table


def _reuse_bar(reuse: Reuse) -> Text:
    parts = [(getattr(reuse, part), sign, style) for part, sign, style in _REUSE_PARTS]
    return _bar(parts, reuse.prompt)


def _pools(info: Mapping[str, Any], look: Look) -> Table:
    table = plain_table("slots", "", *(f"{label} {sign}" for _, sign, _, label in _POOL_PARTS), "windows")
    totals = look["totals"]
    for label, name, capacity in (
        ("full attention", "full", info["full_tokens"]), ("sliding window", "swa", info["swa_tokens"])
    ):  # fmt: skip
        if not capacity:
            continue
        pool = dict(look["pools"][name])
        if not pool["capacity"]:  # before the first step
            pool["free"] = capacity
        parts = [(pool[part], sign, style) for part, sign, style, _ in _POOL_PARTS]
        windows = ""
        if name == "swa":
            kept, evicted, rebuilt = (totals[f"windows_{event}"] for event in ("kept", "evicted", "rebuilt"))
            windows = f"{kept:,} kept, {evicted:,} evicted, {rebuilt:,} rebuilt"
        table.add_row(label, _bar(parts, capacity), *(f"{number:,}" for number, _, _ in parts), windows)
    return table


def _requests(listed: Mapping[str, Any]) -> Table:
    table = plain_table("request", "state", "age", "prompt", "cached", "rebuilt", "answer")
    requests: Sequence[Mapping[str, Any]] = listed["requests"]
    for request in requests[:_SHOWN_REQUESTS]:
        counts = (f"{request[f'{name}_tokens']:,}" for name in ("prompt", "cached", "rebuilt", "completion"))
        table.add_row(str(request["id"])[:16], request["state"], f"{request['age_s']:,.1f} s", *counts)
    left = len(requests) - _SHOWN_REQUESTS + listed["left_out"]
    if left > 0:
        table.add_row(f"and {left:,} more")
    return table


def _bar(parts: Sequence[tuple[int, str, str]], whole: int) -> Text:
    bar, drawn, total = Text(), 0, 0
    for number, sign, style in parts:
        total += number
        # Ends are rounded, not lengths: so the lengths add up to the whole.
        end = round(_BAR_WIDTH * total / whole) if whole else 0
        bar.append(sign * (end - drawn), style=style)
        drawn = end
    return bar


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
