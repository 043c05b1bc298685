"""Rebuilds lost windows of the demo model below full hits of 1,024 to 12,288 tokens, and checks every bit.

    .venv/bin/python benchmarks/rebuild.py [--tokens 1024 4096] [--repeats 5 5] [--dtype float32] [--save]

Per length: a cold run and a rebuild of the same prompt, alternating. All sliding-window slots are filled
with NaN before a rebuild. Compared: 32 greedy tokens, each run by itself; the logits at each; keys and values
of the rebuilt window in every layer. Timed: submission to first token, by the clock and in processor time,
which means something where other work shares the cores, too. --save writes benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import machine_line

from forkpoint.configs.staircase import Staircase
from forkpoint.model.device import set_num_threads
from forkpoint.model.load import Model, load_model
from forkpoint.model.resolve import default_cache_dir, resolve_model
from forkpoint.scheduler.measure_rebuild import NUM_NEW, equal_start
from forkpoint.scheduler.rebuild_probe import PAGE_SIZE, RebuildProbe, Run
from forkpoint.server.cli_measure_text import sample_token_ids
from forkpoint.server.text import Tokenizer

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True, slots=True)
class Row:
    """One length and dtype. Times are to the first token, by the clock and (*_cpu_s) of the processor.

    row_layers: those of a rebuild, as a share of a cold run's.
    """

    dtype: str
    full_hit: int
    first_row: int
    row_layers: float
    cold_s: tuple[float, ...]
    rebuilt_s: tuple[float, ...]
    cold_cpu_s: tuple[float, ...]
    rebuilt_cpu_s: tuple[float, ...]
    equal_tokens: int
    max_logit_error: float
    is_logits_bit_equal: bool
    is_window_bit_equal: bool

    @property
    def share(self) -> float:
        """Processor time of a rebuild over that of a cold run."""
        return statistics.median(self.rebuilt_cpu_s) / statistics.median(self.cold_cpu_s)


def measure(model: Model, token_ids: Sequence[int], num_tokens: int, repeats: int) -> Row:
    """Alternate cold runs and exact rebuilds; any pair that differs counts."""
    probe = RebuildProbe(model, token_ids[: num_tokens + PAGE_SIZE], num_new=NUM_NEW)
    pairs = [(probe.cold(), probe.rebuilt(None)) for _ in range(repeats)]
    stairs = Staircase(model.config.layer_pattern, probe.window, PAGE_SIZE)
    first = pairs[0][1].cached
    row_layers = stairs.row_layers(num_tokens, 0, first, num_tokens)
    return Row(
        dtype=str(model.dtype).removeprefix("torch."),
        full_hit=num_tokens,
        first_row=first,
        row_layers=row_layers / (num_tokens * stairs.num_layers),
        cold_s=tuple(cold.first_token_s for cold, _ in pairs),
        rebuilt_s=tuple(run.first_token_s for _, run in pairs),
        cold_cpu_s=tuple(cold.first_token_cpu_s for cold, _ in pairs),
        rebuilt_cpu_s=tuple(run.first_token_cpu_s for _, run in pairs),
        equal_tokens=min(equal_start(run.tokens, cold.tokens) for cold, run in pairs),
        max_logit_error=max(_logit_error(cold, run) for cold, run in pairs),
        is_logits_bit_equal=all(torch.equal(cold.logits, run.logits) for cold, run in pairs),
        is_window_bit_equal=all(_has_equal_windows(cold, run) for cold, run in pairs),
    )


def _logit_error(cold: Run, run: Run) -> float:
    # Where the answers part, their logits are of different texts.
    same = 1 + equal_start(run.tokens, cold.tokens)
    return float((run.logits[:same] - cold.logits[:same]).abs().max())


def _has_equal_windows(cold: Run, run: Run) -> bool:
    assert cold.window.keys() == run.window.keys() and cold.window
    return all(
        torch.equal(ours, first)
        for layer in cold.window
        for ours, first in zip(run.window[layer], cold.window[layer], strict=True)
    )


def as_markdown(rows: Sequence[Row], machine: str) -> str:
    lines = [
        "# Rebuild of lost windows against a cold prefill",
        "",
        "Demo model (Gemma 3 270M, 15 sliding-window layers of 512, 3 full), pages of 16, chunks of 512,",
        "`cpu` backend. All windows evicted, every free sliding-window slot NaN.",
        "Made by `OMP_NUM_THREADS=1 .venv/bin/python benchmarks/rebuild.py --save`.",
        "",
        f"{machine}.",
        "",
        "| dtype | full hit | starts at | row-layers | cold, CPU s | rebuilt, CPU s | of cold | cold, s | "
        "rebuilt, s | greedy tokens equal | logits | window KV |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.dtype} | {row.full_hit:,} | {row.first_row:,} | {row.row_layers:.0%} "
            f"| {_spread(row.cold_cpu_s)} | {_spread(row.rebuilt_cpu_s)} | {row.share:.0%} "
            f"| {_spread(row.cold_s)} | {_spread(row.rebuilt_s)} "
            f"| {row.equal_tokens} of {NUM_NEW} | {_bits(row.is_logits_bit_equal, row.max_logit_error)} "
            f"| {'bit-equal' if row.is_window_bit_equal else 'differs'} |"
        )
    counts = sorted({len(row.cold_s) for row in rows})
    lines += [
        "",
        f"Time to first token: median (least to most) of {' or '.join(map(str, counts))} alternating runs.",
    ]
    return "\n".join(lines) + "\n"


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


def _bits(is_equal: bool, error: float) -> str:
    return "bit-equal" if is_equal else f"differ by {error:.1g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 12288])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, nargs="+", default=[5, 5, 3], help="of each length")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    set_num_threads()
    model_dir = resolve_model("demo", cache_dir=default_cache_dir(dict(os.environ)), notice=print)
    token_ids = sample_token_ids(Tokenizer.load(model_dir), max(arguments.tokens) + PAGE_SIZE)
    rows: list[Row] = []
    for dtype in arguments.dtype:
        model = load_model(model_dir, dtype=dtype, device="cpu")
        for num_tokens, repeats in zip(arguments.tokens, arguments.repeats, strict=True):
            rows.append(measure(model, token_ids, num_tokens, repeats))
            if arguments.save:
                save(rows)
    print(as_markdown(rows, machine_line()))


def save(rows: Sequence[Row]) -> None:
    """Write rows beside those of other lengths and dtypes that this machine has measured before, today."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "rebuild.json"
    merged = {(row.dtype, row.full_hit): row for row in [*_saved_rows(path), *rows]}
    ordered = [merged[key] for key in sorted(merged, key=lambda key: (key[0] != "float32", key))]
    (RESULTS / "rebuild.md").write_text(as_markdown(ordered, machine_line()), encoding="utf-8")
    figures = {"machine": machine_line(), "rows": [asdict(row) for row in ordered]}
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _saved_rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    figures = json.loads(path.read_text(encoding="utf-8"))
    if figures["machine"] != machine_line():
        return []
    return [Row(**row) for row in figures["rows"]]


if __name__ == "__main__":
    main()
