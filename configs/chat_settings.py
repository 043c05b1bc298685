"""The flags of `forkpoint chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

SERVER = Group.create_ordered("Server")
ANSWERS = Group.create_ordered("Answers")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Which server to talk to, and how it is to answer; None leaves the choice to the server."""

    url: Annotated[str, Parameter(group=SERVER, help="Address of an OpenAI-compatible server.")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str | None,
        Parameter(group=SERVER, show_default=False, help="Served name; default: the first that it serves."),
    ] = None
    api_key: Annotated[
        str | None,
        Parameter(group=SERVER, show_default=False, help="Key that the server wants; `ps` shows it."),
    ] = None
    api_key_file: Annotated[
        Path | None, Parameter(group=SERVER, show_default=False, help="File whose first line is the key.")
    ] = None

    system: Annotated[
        str | None, Parameter(group=ANSWERS, show_default=False, help="System prompt of the chat.")
    ] = None
    max_tokens: Annotated[
        int | None, Parameter(group=ANSWERS, show_default=False, help="Most tokens of one answer.")
    ] = None
    temperature: Annotated[
        float | None, Parameter(group=ANSWERS, show_default=False, help="0 always takes the likeliest token.")
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(group=ANSWERS, show_default=False, help="Share of the likeliest tokens to draw from."),
    ] = None
    seed: Annotated[
        int | None, Parameter(group=ANSWERS, show_default=False, help="Makes answers repeatable.")
    ] = None
