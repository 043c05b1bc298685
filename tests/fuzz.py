"""Random stories against the cache and the whole engine, as long as one likes: `./dev fuzz --seconds 600`.

Each seed builds one world of each sort. A failure prints the seed, the world and how to run it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from support.cache_world import random_step, random_world
from support.engine_world import random_engine, random_engine_step

WORLDS: dict[str, tuple[Callable[[random.Random], Any], Callable[[Any, random.Random], None], str]] = {
    "cache": (random_world, random_step, "drain"),
    "engine": (random_engine, random_engine_step, "finish_all"),
}


def run_seed(sort: str, seed: int, num_steps: int) -> None:
    """One world from birth to its last page returned. Raises what the world finds."""
    make, step, end = WORLDS[sort]
    rng = random.Random(seed)
    world = make(rng)
    for _ in range(num_steps):
        step(world, rng)
    getattr(world, end)()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after this time (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="run this one seed only")
    parser.add_argument("--first-seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--steps", type=int, default=250, help="steps of each world (default 250)")
    parser.add_argument("--sort", choices=sorted(WORLDS), action="append", help="default: all")
    options = parser.parse_args()

    sorts = options.sort or sorted(WORLDS)
    end_s = time.monotonic() + options.seconds
    seed, num_steps = options.first_seed if options.seed is None else options.seed, 0
    while True:
        for sort in sorts:
            try:
                run_seed(sort, seed, options.steps)
            except Exception:
                traceback.print_exc()
                sys.stdout.write(f"\nagain: ./dev fuzz --sort {sort} --seed {seed} --steps {options.steps}\n")
                return 1
            num_steps += options.steps
        seed += 1
        if options.seed is not None or time.monotonic() >= end_s:
            sys.stdout.write(
                f"{num_steps} random steps, seeds {options.first_seed}..{seed - 1}: no finding\n"
            )
            return 0


if __name__ == "__main__":
    sys.exit(main())
