"""Tables of the cache replay: every row beside the reference, the most work per group, what fell short."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from replay_rows import DEFAULT_ARM, REFERENCE_ARMS, Outcome, Reference, Row

# Served shares may fall this many percentage points below the ideal.
SERVED_TOLERANCE = 0.01
# Work, as a multiple of the least of the reference's arms.
WORK_TOLERANCE = {"ample": 1.01, "tight": 1.02}

Outcomes = dict[Row, dict[str, Outcome]]


def by_row(outcomes: Iterable[Outcome]) -> Outcomes:
    """Outcomes per row and arm, in the order of the rows."""
    found: Outcomes = {}
    for outcome in outcomes:
        found.setdefault(outcome.row, {})[outcome.arm] = outcome
    return found


def row_table(outcomes: Outcomes, reference: dict[Row, Reference]) -> str:
    """Markdown: served % and work of every arm, ours and the reference's; - where it has no such row."""
    arms = list(next(iter(outcomes.values())))
    head = ["trace", "S", "W", "P", "conc", "pools", "ideal %"]
    head += [f"{arm}: %" for arm in arms] + [f"{arm}: work" for arm in arms]
    head += [f"SGLang {arm}: {what}" for what in ("%", "work") for arm in REFERENCE_ARMS]
    lines = []
    for row, ours in outcomes.items():
        first = next(iter(ours.values()))
        cells = [str(value) for value in asdict(row).values()] + [f"{first.ideal_pct:.2f}"]
        cells += [f"{outcome.served_pct:.2f}" for outcome in ours.values()]
        cells += [f"{outcome.work:.2f}" for outcome in ours.values()]
        theirs = reference.get(row)
        if theirs is None:
            cells += ["-"] * (2 * len(REFERENCE_ARMS))
        else:
            cells += [f"{share:.2f}" for share in theirs.served_pct.values()]
            cells += [f"{theirs.work(arm, first.row_layers_ideal):.2f}" for arm in REFERENCE_ARMS]
        lines.append(cells)
    return _markdown(head, lines)


def group_table(outcomes: Outcomes) -> str:
    """Markdown: the most work of any row per trace, pools and window, as a multiple of the ideal."""
    arms = list(next(iter(outcomes.values())))
    groups: dict[tuple[str, str, int], list[dict[str, Outcome]]] = {}
    for row, ours in outcomes.items():
        groups.setdefault((row.pools, row.kind, row.window), []).append(ours)
    lines = []
    for (pools, kind, window), members in sorted(groups.items()):
        most = [max(ours[arm].work for ours in members) for arm in arms]
        lines.append([pools, kind, str(window), *(f"{work:.3f}" for work in most)])
    return _markdown(["pools", "trace", "W", *arms], lines)


def shortfalls(outcomes: Outcomes, reference: dict[Row, Reference]) -> tuple[list[str], list[str]]:
    """What is wrong, and where the default arm does more work than the best arm of the reference."""
    wrong, slower = [], []
    for row, ours in outcomes.items():
        for outcome in ours.values():
            where = f"{row.kind} {row.label}, {outcome.arm}"
            if outcome.leaked_slots:
                wrong.append(f"{where}: {outcome.leaked_slots} slots leaked")
            does_rebuild = not outcome.arm.startswith("no rebuild")
            if does_rebuild and outcome.served_pct < outcome.ideal_pct - SERVED_TOLERANCE:
                wrong.append(f"{where}: {outcome.served_pct:.2f} % served, ideal {outcome.ideal_pct:.2f} %")
        default, theirs = ours[DEFAULT_ARM], reference.get(row)
        if theirs is not None:
            least = theirs.least_work(default.row_layers_ideal)
            if default.work > least * WORK_TOLERANCE[row.pools]:
                slower.append(f"{row.kind} {row.label}: work {default.work:.3f}, reference {least:.3f}")
    return wrong, slower


def write_csv(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Every number of every row and arm."""
    records = []
    for outcome in outcomes:
        record = asdict(outcome)
        records.append({**record.pop("row"), **record})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + "\n"
