"""The one table of formats in which model families write calls and reasoning, and how a model's is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from forkpoint.server.message_pieces import NewParser
from forkpoint.server.parsers import function_gemma, hermes, llama3, mistral
from forkpoint.server.parsers.call_syntax import CallSyntax
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.json_calls import read_json_calls
from forkpoint.server.parsers.machine import TextMachine
from forkpoint.server.parsers.pieces import PieceWriter
from forkpoint.server.parsers.qwen3_coder import ParameterSchemas, read_qwen3_coder
from forkpoint.server.parsers.think import MISTRAL_THINK, THINK, ThinkTags

ReadCalls = Callable[[Cursor, PieceWriter, ParameterSchemas], Reading[None]]

JSON_SYNTAX = CallSyntax()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """read: reads an output; its schemas are those of the functions that the request gave.

    markers: special tokens in some tokenizers, whose text the reading must see. syntax: how calls are written
    where they are forced; `read` reads that too.
    """

    read: ReadCalls
    markers: tuple[str, ...] = ()
    syntax: CallSyntax = JSON_SYNTAX

    def new_parser(self, schemas: ParameterSchemas, max_calls: int | None = None) -> NewParser:
        """Makes the parser of one choice. schemas: by name of the function and of the parameter."""

        def read(cursor: Cursor, pieces: PieceWriter) -> Reading[None]:
            return self.read(cursor, pieces, schemas)

        return lambda: TextMachine(read, max_calls=max_calls)


_HERMES_SYNTAX = CallSyntax(
    opening=f'{hermes.OPENING}\n{{"name": ', closing=f"}}\n{hermes.CLOSING}", between="\n"
)
_HERMES_MARKERS = (hermes.OPENING, hermes.CLOSING)
_MISTRAL_MARKERS = (mistral.OPENING, mistral.CALL_ID, mistral.ARGUMENTS)

CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        lambda cursor, pieces, _: hermes.read_hermes(cursor, pieces), _HERMES_MARKERS, _HERMES_SYNTAX
    ),
    # Its arguments are no JSON, so forced calls are written as Hermes does.
    "qwen3_coder": CallFormat(read_qwen3_coder, _HERMES_MARKERS, _HERMES_SYNTAX),
    "llama3_json": CallFormat(
        llama3.read_llama3, (llama3.PYTHON_TAG,), CallSyntax(head=', "parameters": ', between="; ")
    ),
    "mistral": CallFormat(
        lambda cursor, pieces, _: mistral.read_mistral(cursor, pieces),
        _MISTRAL_MARKERS,
        CallSyntax(before=f"{mistral.OPENING}[", between=", ", after="]"),
    ),
    "mistral_v11": CallFormat(
        lambda cursor, pieces, _: mistral.read_mistral(cursor, pieces),
        _MISTRAL_MARKERS,
        CallSyntax(
            opening=mistral.OPENING, head=mistral.ARGUMENTS, closing="", between="", has_quoted_name=False
        ),
    ),
    "gemma": CallFormat(partial(read_json_calls, reads_python=True)),
    # Its arguments are no JSON, so forced calls are plain JSON objects.
    "functiongemma": CallFormat(
        function_gemma.read_function_gemma,
        (function_gemma.OPENING, function_gemma.CLOSING, function_gemma.STRING_MARK),
    ),
    "json": CallFormat(read_json_calls),
}

REASONING_TAGS: Mapping[str, ThinkTags] = {
    "think": THINK,
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": MISTRAL_THINK,
}

# What in a chat template tells the format; the first that is there decides.
_CALL_SIGNS = (
    (function_gemma.OPENING, "functiongemma"),
    ("[ARGS]", "mistral_v11"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
    ("<start_of_turn>", "gemma"),
)
_REASONING_SIGNS = ((MISTRAL_THINK.opening, "mistral"), (THINK.opening, "think"), (THINK.closing, "think"))


def detect_call_format(template: str) -> str:
    """Name of the format that goes with this chat template; `json` if nothing tells."""
    return next((name for sign, name in _CALL_SIGNS if sign in template), "json")


def detect_reasoning(template: str) -> str | None:
    """Name of the reasoning tags that go with this chat template; None if it knows none."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), None)
