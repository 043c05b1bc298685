"""The flags of `forkpoint top`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True, slots=True)
class TopSettings:
    """Which server to look at, and how often."""

    url: Annotated[str, Parameter(help="Address of a Forkpoint server.")] = "http://127.0.0.1:8000"
    api_key: Annotated[
        str | None, Parameter(show_default=False, help="Key that the server wants; `ps` shows it.")
    ] = None
    api_key_file: Annotated[
        Path | None, Parameter(show_default=False, help="File whose first line is the key.")
    ] = None
    interval: Annotated[float, Parameter(help="Seconds between two looks.")] = 1.0
    once: Annotated[
        bool, Parameter(negative="", help="Look twice, an interval apart, print that, and end.")
    ] = False
