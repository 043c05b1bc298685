"""Measures what a step costs the engine process beside the model, with a model that costs nothing.

    .venv/bin/python benchmarks/step_overhead.py [--sequences 1 8 64 256] [--repeats 5] [--steps 300] [--save]

The engine is the real one in a process of its own: its loop, scheduler, cache, page tables, messages, pipe;
only the runner is a double that returns made-up tokens. Host time of a step is what passes from one call of
the runner to the next. This process is at the other end of the pipe and reads all that comes.

decode: all sequences decode. mixed: as many decode while long prompts are prefilled in chunks beside them.
Parts are told in the same run by marks in the engine: plan (with the reservation of pages), inputs (tables
and arrays), draws, commit, report (the step's message), messages (pickling, the pipe, looking for news).
Repeats alternate between the states. --save writes benchmarks/results/step_overhead.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from step_engine import PARTS, StepSample, run_probed_engine

from forkpoint.configs.sampling import SamplingParams
from forkpoint.scheduler.messages import Ready, Shutdown, StepTokens, Submit

RESULTS = Path(__file__).with_name("results")
# Longer than the window, so that pages leave it at their usual pace.
PROMPT_TOKENS = 700
LONG_PROMPT_TOKENS = 4096
# Steps before those that count: until the window moves and caches of the processor are warm.
WARM_STEPS = 50


@dataclass(frozen=True, slots=True)
class State:
    """What runs: sequences that decode, and prompts that are being prefilled beside them, one at a time."""

    sequences: int
    has_prefill: bool

    @property
    def name(self) -> str:
        return f"{'mixed' if self.has_prefill else 'decode'} {self.sequences}"


@dataclass(frozen=True, slots=True)
class Row:
    """One state. step_us: the median step of each repeat. parts_us: medians over the repeats' medians."""

    state: State
    step_us: tuple[float, ...]
    parts_us: dict[str, float]

    @property
    def median_us(self) -> float:
        return statistics.median(self.step_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the last engine process here")
    arguments = parser.parse_args()
    states = [State(count, kind) for kind in (False, True) for count in arguments.sequences]
    rows = measure(states, arguments.repeats, arguments.steps, arguments.profile)
    print(table(rows))
    if arguments.save:
        save(rows)


def measure(states: Sequence[State], repeats: int, num_steps: int, profile: Path | None = None) -> list[Row]:
    """Every state `repeats` times, alternating, each in a new engine process."""
    found: dict[State, list[list[StepSample]]] = {state: [] for state in states}
    for _ in range(repeats):
        for state in states:
            found[state].append(one_run(state, num_steps, profile))
    return [_row(state, found[state]) for state in states]


def _row(state: State, runs: Sequence[Sequence[StepSample]]) -> Row:
    def medians(value_ns: Callable[[StepSample], int]) -> tuple[float, ...]:
        return tuple(round(statistics.median(map(value_ns, run)) / 1e3, 1) for run in runs)

    parts = {
        part: statistics.median(medians(lambda sample, part=part: sample.parts_ns[part]))  # type: ignore[misc]
        for part in PARTS
    }
    return Row(state, medians(lambda sample: sample.step_ns), parts)


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"| state | us per step, median | least | most | per sequence | {' | '.join(PARTS)} |",
        f"|---|{'--:|' * (4 + len(PARTS))}",
    ]
    for row in rows:
        numbers = [row.median_us, min(row.step_us), max(row.step_us), row.median_us / row.state.sequences]
        cells = [f"{number:.0f}" for number in (*numbers, *row.parts_us.values())]
        lines.append(f"| {row.state.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def save(rows: Sequence[Row]) -> None:
    # Only here: it imports torch, and every engine process imports this file.
    from machine import machine_line

    machine = machine_line()
    repeats = len(rows[0].step_us)
    text = (
        "# Host time of a step beside the model\n\n"
        f"`benchmarks/step_overhead.py`, {repeats} runs each, of a run the median step, in microseconds; "
        f"parts as medians of these. {machine}.\n\n{table(rows)}\n"
    )
    RESULTS.joinpath("step_overhead.md").write_text(text, encoding="utf-8")
    record = {"machine": machine, "rows": [asdict(row) for row in rows]}
    RESULTS.joinpath("step_overhead.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# ---- the other end of the pipe


def one_run(state: State, num_steps: int, profile: Path | None) -> list[StepSample]:
    """Steps of one state in a new engine process: those in which everything runs that should."""
    context = multiprocessing.get_context("spawn")
    inbox, to_engine = context.Pipe(duplex=False)
    from_engine, outbox = context.Pipe(duplex=False)
    samples, samples_end = context.Pipe(duplex=False)
    engine = context.Process(
        target=run_probed_engine, args=(inbox, outbox, samples_end, profile), daemon=True
    )
    engine.start()
    for end in (inbox, outbox, samples_end):
        end.close()
    try:
        first = _drive(state, num_steps, to_engine, from_engine)
        _send(to_engine, Shutdown())
        while not samples.poll(0.01):
            _drain(from_engine)  # or the engine could not get rid of its last steps
        recorded: list[StepSample] = pickle.loads(samples.recv_bytes())
    finally:
        engine.join(10)
        engine.kill()
    return recorded[first : first + num_steps]


def _drive(state: State, num_steps: int, to_engine: Connection, from_engine: Connection) -> int:
    """Submit, then read until enough steps ran; returns the index of the first step that counts."""
    rng = np.random.default_rng(0)
    num_submitted = 0

    def submit(num_tokens: int, max_tokens: int) -> None:
        nonlocal num_submitted
        tokens = rng.integers(1000, 200_000, num_tokens).astype(np.int32)
        _send(to_engine, Submit(num_submitted, tokens, SamplingParams(num_submitted, max_tokens)))
        num_submitted += 1

    assert isinstance(pickle.loads(from_engine.recv_bytes()), Ready)
    for _ in range(state.sequences):
        submit(PROMPT_TOKENS, 100_000)
    num_run = first = num_prompts = 0
    while not first or num_run < first + num_steps + 1:
        step = pickle.loads(from_engine.recv_bytes())
        assert isinstance(step, StepTokens)
        num_run = step.stats.num_steps
        while state.has_prefill and first and num_prompts < 2:  # one that runs, one that waits
            submit(LONG_PROMPT_TOKENS, 1)
            num_prompts += 1
        num_prompts -= len(step.finished)
        if not first and step.num_decode_rows == state.sequences:
            first = num_run + WARM_STEPS
    return first


def _send(pipe: Connection, message: Submit | Shutdown) -> None:
    pipe.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _drain(pipe: Connection) -> None:
    try:
        while pipe.poll():
            pipe.recv_bytes()
    except EOFError:
        return


if __name__ == "__main__":
    main()
