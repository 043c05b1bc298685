"""The picture of a run: how latencies are distributed, and how much of the prompts was cached over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forkpoint.configs.errors import ConfigError
from forkpoint.server.bench.record import RequestRecord
from forkpoint.server.bench.report import percentile

# Blue and vermilion of Okabe and Ito's palette: told apart with any colour vision, and in grey.
_BLUE, _VERMILION, _GREY = "#0072B2", "#D55E00", "#777777"
_MOVING = 8  # requests


def check_plot(path: Path) -> None:
    """Raise ConfigError now, not after minutes of load, if no picture could be written."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder", hint="make it, or name another one")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed", hint="pip install 'forkpoint[bench]'"
        ) from error


def write_plot(path: Path, records: Sequence[RequestRecord], title: str) -> None:
    """Write a PNG of the measured requests that did not fail."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = [record for record in records if not record.is_warmup and not record.has_failed]
    figure, (ttft, itl, hits) = plt.subplots(1, 3, figsize=(13, 4))
    _draw_distribution(
        ttft, [1e3 * each.answer.ttft_s for each in done if each.answer.ttft_s is not None],
        "time to first token, ms", "requests, %",
    )  # fmt: skip
    _draw_distribution(
        itl, [1e3 * value for each in done for value in each.answer.itls_s],
        "inter-token latency, ms", "tokens, %",
    )  # fmt: skip
    _draw_hits(hits, done)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_distribution(axes, values: Sequence[float], name: str, share: str) -> None:  # type: ignore[no-untyped-def]
    """The share of values up to each value: readable at a median, and at a 99th percentile."""
    axes.set_xlabel(name)
    axes.set_ylabel(share)
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    if not values:
        axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes)
        return
    ordered = sorted(values)
    axes.plot(ordered, [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))], color=_BLUE)
    for percent, style in ((50, "-"), (99, ":")):
        value = percentile(ordered, percent)
        axes.axvline(value, color=_VERMILION, linestyle=style, linewidth=1, label=f"p{percent} {value:,.1f}")
    if ordered[-1] > 20 * max(ordered[0], 1e-3):
        axes.set_xscale("log")
    axes.legend(loc="lower right", fontsize=8)


def _draw_hits(axes, done: Sequence[RequestRecord]) -> None:  # type: ignore[no-untyped-def]
    axes.set_xlabel("sent, seconds from the begin")
    axes.set_ylabel("prompt tokens from the cache, %")
    axes.set_ylim(-2, 102)
    axes.grid(alpha=0.3)
    told = sorted(
        (
            record
            for record in done
            if record.answer.cached_tokens is not None and record.answer.prompt_tokens
        ),
        key=lambda record: record.start_s,
    )
    if not told:
        axes.text(0.5, 0.5, "the server does not say", ha="center", transform=axes.transAxes)
        return
    times = [record.start_s for record in told]
    cached = [record.answer.cached_tokens or 0 for record in told]
    prompts = [record.answer.prompt_tokens or 1 for record in told]
    shares = [100 * hit / prompt for hit, prompt in zip(cached, prompts, strict=True)]
    axes.plot(times, shares, ".", color=_GREY, markersize=4, label="a request")
    moving = []
    for index in range(len(told)):
        window = slice(max(0, index + 1 - _MOVING), index + 1)
        moving.append(100 * sum(cached[window]) / sum(prompts[window]))
    axes.plot(times, moving, color=_BLUE, label=f"mean of {_MOVING}")
    axes.legend(loc="lower right", fontsize=8)
