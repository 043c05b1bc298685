"""What the measurements of all rounds say: ratios against the peers, targets, tables, and the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers_cells import CELLS, MEMORY, START, Metric

# server -> (cell, metric) -> a value for each round
Values = Mapping[str, Mapping[tuple[str, str], Sequence[float]]]

METRICS: Mapping[tuple[str, str], tuple[str, Metric]] = {
    **{(cell.name, metric.name): (cell.title, metric) for cell in CELLS for metric in cell.metrics},
    ("start", "start"): ("start to ready", START),
    ("memory", "memory"): ("peak resident memory", MEMORY),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio ours / peer's that is to be reached: at least for throughput, at most for times."""

    cell: str
    metric: str
    bound: float
    ours: str = "forkpoint"
    peer: str = "vllm"

    @property
    def key(self) -> tuple[str, str]:
        return self.cell, self.metric

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.bound if METRICS[self.key][1].more_is_better else ratio <= self.bound


TARGETS = (
    Target("prefill1024", "prefill", 1.2),
    Target("prefill4096", "prefill", 1.2),
    Target("stream1", "tpot", 0.7),
    Target("stream1", "tpot", 0.5, ours="forkpoint-int8"),
    Target("stream1", "tpot", 1.0, ours="forkpoint-int8", peer="llama.cpp-q4"),
    Target("stream8", "output", 1.4),
    *(
        Target(f"shared{system}x{at_once}", metric, bound)
        for system in (1024, 2048)
        for at_once in (4, 8)
        for metric, bound in (("ttft", 0.7), ("output", 1.3))
    ),
    Target("chat", "ttft", 0.6),
    Target("start", "start", 0.2),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours / peer's within each round: their median, least and most."""

    median: float
    least: float
    most: float


def ratio(values: Values, key: tuple[str, str], ours: str, peer: str) -> Ratio | None:
    """None where one of them was not measured. Rounds that lack one of them are left out."""
    pairs = zip(values.get(ours, {}).get(key, ()), values.get(peer, {}).get(key, ()), strict=False)
    ratios = [one / other for one, other in pairs if not (math.isnan(one) or math.isnan(other)) and other > 0]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def as_markdown(values: Values, *, machine: str, versions: Mapping[str, str], notes: Sequence[str]) -> str:
    """Two tables: ratios against the targets, and everything that was measured."""
    lines = ["# Forkpoint and its peers on one CPU", ""]
    lines += ["Gemma 3 270M. Made by `.venv/bin/python benchmarks/peers.py --save`.", "", f"{machine}.", ""]
    lines += [f"* {name}: {version}" for name, version in versions.items()] + [""]
    lines += ["| target | ratio, median (least to most) | wanted | |", "|---|---|---|---|"]
    for target in TARGETS:
        title, metric = METRICS[target.key]
        found = ratio(values, target.key, target.ours, target.peer)
        sign = "at least" if metric.more_is_better else "at most"
        named = f"{title}, {metric.name} ({metric.unit}): {target.ours} / {target.peer}"
        if found is None:
            lines.append(f"| {named} | not measured | {sign} {target.bound:g} | |")
            continue
        verdict = "met" if target.is_met(found.median) else "**missed**"
        shown = f"{found.median:.2f} ({found.least:.2f} to {found.most:.2f})"
        lines.append(f"| {named} | {shown} | {sign} {target.bound:g} | {verdict} |")
    servers = list(values)
    lines += ["", "Medians of the rounds (least to most):", ""]
    lines += [f"| | {' | '.join(servers)} |", "|---" * (len(servers) + 1) + "|"]
    for key, (title, metric) in METRICS.items():
        cells = [_spread(values[server].get(key, ())) for server in servers]
        lines.append(f"| {title}, {metric.name}, {metric.unit} | {' | '.join(cells)} |")
    lines += ["", *(f"* {note}" for note in notes)]
    return "\n".join(lines).rstrip() + "\n"


def plot(path: Path, values: Values, peers: Sequence[str], subtitle: str) -> None:
    """A PNG: how many times better ours is than each peer, per figure, on a log axis; targets as marks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys = [key for key in METRICS if key[1] not in ("cached", "memory")]
    colours = ("#0072B2", "#D55E00", "#009E73")
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(keys) + 1.6))
    height = 0.8 / max(1, len(peers))
    for place, (peer, colour) in enumerate(zip(peers, colours, strict=False)):
        for row, key in enumerate(keys):
            found = ratio(values, key, "forkpoint", peer)
            if found is None:
                continue
            better = found.median if METRICS[key][1].more_is_better else 1 / found.median
            label = f"against {peer}" if row == 0 else None
            axes.barh(row + place * height, better - 1, height, left=1, color=colour, label=label)
            axes.text(better, row + place * height, f" {better:.2f}x ", va="center", fontsize=8,
                      ha="left" if better >= 1 else "right")  # fmt: skip
    for target in TARGETS:
        if target.ours == "forkpoint" and target.key in keys:
            bound = target.bound if METRICS[target.key][1].more_is_better else 1 / target.bound
            row = keys.index(target.key)
            axes.plot([bound, bound], [row - 0.45, row + 0.45], color="black", linewidth=1.5)
    axes.plot([], [], color="black", linewidth=1.5, label="target against vLLM")
    axes.axvline(1, color="#777777", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_yticks([row + 0.2 for row in range(len(keys))], [f"{METRICS[key][0]}: {key[1]}" for key in keys])
    axes.invert_yaxis()
    axes.set_xlabel("times better than the peer (throughput, or its inverse for times)")
    axes.set_title(f"Forkpoint, bfloat16\n{subtitle}", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _spread(numbers: Sequence[float]) -> str:
    known = [number for number in numbers if not math.isnan(number)]
    if not known:
        return ""
    digits = 0 if min(known) >= 100 else 1
    median, least, most = statistics.median(known), min(known), max(known)
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"
