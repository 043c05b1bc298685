"""The rows and arms of the cache replay, and the reference's numbers for them."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from forkpoint.scheduler.traces import WORKLOAD_KINDS, WorkloadKind

REFERENCE_FILE = Path(__file__).parent / "data" / "sglang_0_5_23.csv"
NUM_LAYERS = 18


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of the replay; the reference's numbers are filed under the same names."""

    kind: WorkloadKind
    system: int
    window: int
    page_size: int
    concurrency: int
    pools: str

    @property
    def label(self) -> str:
        return f"{self.system} W{self.window} P{self.page_size} x{self.concurrency} {self.pools}"


@dataclass(frozen=True, slots=True)
class Arm:
    """A choice of policies."""

    name: str
    retention: str
    eviction: str
    rebuilds: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one row gave under one arm."""

    row: Row
    arm: str
    served_pct: float
    ideal_pct: float
    row_layers: int
    row_layers_ideal: int
    computed_tokens: int
    rebuilt_tokens: int
    recomputed_tokens: int
    evicted_full_slots: int
    evicted_swa_slots: int
    retractions: int
    leaked_slots: int

    @property
    def work(self) -> float:
        """Row-layers as a multiple of the ideal's."""
        return self.row_layers / self.row_layers_ideal


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference's three arms on one row: served %, and tokens run through prefill."""

    served_pct: dict[str, float]
    prefilled: dict[str, int]

    def work(self, arm: str, row_layers_ideal: int) -> float:
        """Row-layers as a multiple of the ideal's; every prefilled token runs in every layer."""
        return self.prefilled[arm] * NUM_LAYERS / row_layers_ideal

    def least_work(self, row_layers_ideal: int) -> float:
        return min(self.work(arm, row_layers_ideal) for arm in self.prefilled)


REFERENCE_ARMS = {"branch": "branch", "no branch": "no_branch", "keep all": "keep_all"}
DEFAULT_ARM = "anchors, cost"
ARMS = (
    Arm(DEFAULT_ARM, "anchors", "cost"),
    Arm("branch, cost", "branch", "cost"),
    Arm("no rebuild, branch, lru", "branch", "lru", rebuilds=False),
    Arm("tail, cost", "tail", "cost"),
    Arm("anchors, lru", "anchors", "lru"),
)
QUICK_ARMS = ARMS[:3]


def rows(*, is_quick: bool) -> list[Row]:
    """All 160 rows, or those with the small system prompt and page 1."""
    systems, page_sizes = ((2048,), (1,)) if is_quick else ((2048, 8192), (1, 16))
    settings = product(WORKLOAD_KINDS, systems, (128, 512), page_sizes, (1, 8), ("ample", "tight"))
    return [Row(*setting) for setting in settings]


def read_reference(path: Path = REFERENCE_FILE) -> dict[Row, Reference]:
    """The reference's numbers by row. It has none for zipf and few-shot beyond page 1 and 2,048 tokens."""
    with path.open() as lines:
        entries = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    by_text = {tuple(str(value) for value in asdict(row).values()): row for row in rows(is_quick=False)}
    found = {}
    for entry in entries:
        row = by_text[tuple(entry[name] for name in asdict(next(iter(by_text.values()))))]
        found[row] = Reference(
            {arm: float(entry[f"{column}_pct"]) for arm, column in REFERENCE_ARMS.items()},
            {arm: int(entry[f"{column}_recomputed"]) for arm, column in REFERENCE_ARMS.items()},
        )
    return found
