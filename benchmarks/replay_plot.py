"""The picture of the cache replay: served share and work of every row, ours and the reference's."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from replay_rows import DEFAULT_ARM, REFERENCE_ARMS, Outcome, Reference, Row
from replay_tables import Outcomes

OUR_COLOURS = ("tab:blue", "tab:cyan", "tab:gray", "tab:green", "tab:purple")
REFERENCE_COLOURS = ("tab:red", "tab:orange", "tab:brown")


def plot(path: Path, outcomes: Outcomes, reference: dict[Row, Reference]) -> None:
    """Write a PNG: a column per trace; above the served share, below the work."""
    kinds = list(dict.fromkeys(row.kind for row in outcomes))
    figure, axes = plt.subplots(2, len(kinds), figsize=(5.2 * len(kinds), 10), squeeze=False, sharex="col")
    for column, kind in enumerate(kinds):
        rows = sorted(
            (row for row in outcomes if row.kind == kind),
            key=lambda row: (row.pools, row.system, row.window, row.page_size, row.concurrency),
        )
        ours = [outcomes[row] for row in rows]
        theirs = [reference.get(row) for row in rows]
        _plot_served(axes[0, column], ours, theirs)
        _plot_work(axes[1, column], ours, theirs)
        axes[0, column].set_title(kind)
        axes[1, column].set_xticks(range(len(rows)), [row.label for row in rows], rotation=90, fontsize=6)
    axes[0, 0].set_ylabel("served, % of prompt tokens")
    axes[1, 0].set_ylabel("row-layers, multiple of the ideal")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_served(axes: Axes, ours: list[dict[str, Outcome]], theirs: list[Reference | None]) -> None:
    axes.plot([one[DEFAULT_ARM].ideal_pct for one in ours], "_", color="black", markersize=12, label="ideal")
    for arm, colour in zip(ours[0], OUR_COLOURS, strict=False):
        axes.plot([one[arm].served_pct for one in ours], ".", color=colour, label=arm)
    for arm, colour in zip(REFERENCE_ARMS, REFERENCE_COLOURS, strict=True):
        shares = [None if one is None else one.served_pct[arm] for one in theirs]
        _plot_known(axes, shares, colour, f"SGLang {arm}")
    axes.set_ylim(-3, 103)
    axes.grid(alpha=0.3)


def _plot_work(axes: Axes, ours: list[dict[str, Outcome]], theirs: list[Reference | None]) -> None:
    for arm, colour in zip(ours[0], OUR_COLOURS, strict=False):
        axes.plot([one[arm].work for one in ours], ".", color=colour, label=arm)
    ideals = [one[DEFAULT_ARM].row_layers_ideal for one in ours]
    for arm, colour in zip(REFERENCE_ARMS, REFERENCE_COLOURS, strict=True):
        work = [
            None if one is None else one.work(arm, ideal) for one, ideal in zip(theirs, ideals, strict=True)
        ]
        _plot_known(axes, work, colour, f"SGLang {arm}")
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.grid(alpha=0.3, which="both")


def _plot_known(axes: Axes, values: list[float | None], colour: str, label: str) -> None:
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    places, heights = [index for index, _ in known], [value for _, value in known]
    axes.plot(places, heights, "x", color=colour, markersize=4, label=label)
