"""The flags of `forkpoint measure-rebuild`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

MEASURE = Group.create_ordered("Measurement")
Depth = int | Literal["exact"]
DEFAULT_DEPTHS: tuple[Depth, ...] = (1, 2, 4, 8, "exact")
# Enough for the staircase of most models to end above 0, and a matter of seconds on a CPU.
DEFAULT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """What to measure; the flags of the command."""

    depth: Annotated[
        tuple[Depth, ...],
        Parameter(
            group=MEASURE,
            negative="",
            show_default=False,
            help="Windows to rebuild, or exact; repeatable. Default: 1, 2, 4, 8 and exact.",
        ),
    ] = ()
    tokens: Annotated[
        int, Parameter(group=MEASURE, help="Length of the full hit, rounded down to pages of 16.")
    ] = DEFAULT_TOKENS
    text: Annotated[
        Path | None,
        Parameter(group=MEASURE, help="UTF-8 file that the hit is read from; default: a text of ours."),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Parameter(group=MEASURE, help="float32 shows the error alone; bfloat16 drowns small ones in noise."),
    ] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(group=MEASURE, help="Where it runs.")] = (
        "auto"
    )
    as_json: Annotated[
        bool, Parameter(name="--json", group=MEASURE, negative="", help="Print JSON instead of a table.")
    ] = False
