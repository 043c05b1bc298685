"""The chat of a request as its template is to see it: messages, tools and options together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forkpoint.server.chat_messages import Message, read_messages
from forkpoint.server.fields import Fields
from forkpoint.server.rendering import Rendering, read_rendering
from forkpoint.server.tools import Tools, read_tools
from forkpoint.server.tools_dialect import Dialect


@dataclass(frozen=True, slots=True)
class Chat:
    """tools: None if the request has none. continued: text of the message that the output goes on with."""

    messages: Sequence[Message]
    rendering: Rendering
    tools: Tools | None
    continued: str


def read_chat(body: Mapping[str, object], dialect: Dialect, *, max_pieces: int) -> Chat:
    """Validate a chat. max_pieces: see read_messages(). Raises RequestError."""
    messages = read_messages(body.get("messages"), max_pieces=max_pieces)
    tools = read_tools(body)
    rendering = read_rendering(Fields(body))
    last = messages[-1].get("content") if rendering.continue_final_message else None
    prepared, rendering = dialect.prepared(messages, rendering, tools)
    return Chat(prepared, rendering, tools, continued=last if isinstance(last, str) else "")
