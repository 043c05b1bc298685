"""The one table of formats in which model families write calls and reasoning, and how a model's is found."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

from forkpoint.server.message_pieces import NewParser
from forkpoint.server.parsers import function_gemma, harmony, hermes, llama3, mistral, qwen3_coder
from forkpoint.server.parsers.call_syntax import CallSyntax
from forkpoint.server.parsers.cursor import Cursor, Reading
from forkpoint.server.parsers.json_calls import read_json_calls
from forkpoint.server.parsers.machine import TextMachine
from forkpoint.server.parsers.pieces import PieceWriter
from forkpoint.server.parsers.qwen3_coder import ParameterSchemas
from forkpoint.server.parsers.think import MISTRAL_THINK, THINK, ThinkTags

ReadCalls = Callable[[Cursor, PieceWriter, "CallScope"], Reading[None]]

JSON_SYNTAX = CallSyntax()


@dataclass(frozen=True, slots=True)
class CallScope:
    """Which functions may be called. schemas: their parameters', by name of the function and the parameter.

    is_closed: what looks like a call of another function is none, even where the format marks it as a call.
    tells_reasoning: False: a format with channels leaves the reasoning in the content.
    """

    schemas: ParameterSchemas
    is_closed: bool = False
    tells_reasoning: bool = True

    @property
    def marked_names(self) -> Container[str] | None:
        """The names that may stand in a marked call; None: any, since the client can tell the model."""
        return self.schemas if self.is_closed else None


@dataclass(frozen=True, slots=True)
class CallFormat:
    """read: reads an output.

    markers: special tokens in some tokenizers, whose text the reading must see. syntax: how calls are written
    where they are forced; marked_syntax: where the answer may also be other JSON, or None. `read` reads both.
    has_channels: all of an output is in this format, reasoning and answers too. end_markers: special tokens
    after which a model waits for others; older files of gpt-oss do not name them all.
    """

    read: ReadCalls
    markers: tuple[str, ...]
    syntax: CallSyntax
    marked_syntax: CallSyntax | None
    has_channels: bool = False
    end_markers: tuple[str, ...] = ()

    def new_parser(
        self,
        schemas: ParameterSchemas,
        max_calls: int | None = None,
        *,
        is_closed: bool = False,
        tells_reasoning: bool = True,
    ) -> NewParser:
        """Makes the parser of one choice. max_calls: later calls are dropped. The others: see CallScope."""
        scope = CallScope(schemas, is_closed, tells_reasoning)

        def read(cursor: Cursor, pieces: PieceWriter) -> Reading[None]:
            return self.read(cursor, pieces, scope)

        return lambda: TextMachine(read, max_calls=max_calls)


def _read_hermes(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    return hermes.read_hermes(cursor, pieces, scope.marked_names)


def _read_qwen3_coder(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    return qwen3_coder.read_qwen3_coder(cursor, pieces, scope.schemas, scope.marked_names)


def _read_llama3(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    return llama3.read_llama3(cursor, pieces, scope.schemas, scope.marked_names)


def _read_mistral(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    return mistral.read_mistral(cursor, pieces, scope.marked_names)


def _read_gemma(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    return read_json_calls(cursor, pieces, scope.schemas, reads_python=True)


def _read_function_gemma(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    return function_gemma.read_function_gemma(cursor, pieces, scope.schemas, scope.marked_names)


def _read_harmony(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    known = harmony.HarmonyScope(scope.schemas, scope.marked_names, scope.tells_reasoning)
    return harmony.read_harmony(cursor, pieces, known)


def _read_json(cursor: Cursor, pieces: PieceWriter, scope: CallScope) -> Reading[None]:
    return read_json_calls(cursor, pieces, scope.schemas)


_HERMES_SYNTAX = CallSyntax(opening=f'{hermes.OPENING}\n{{"name": ', closing=f"}}\n{hermes.CLOSING}")
_HERMES_MARKERS = (hermes.OPENING, hermes.CLOSING)
_LLAMA3_SYNTAX = CallSyntax(head=', "parameters": ', between="; ", is_single=True)
_MISTRAL_MARKERS = (mistral.OPENING, mistral.CALL_ID, mistral.ARGUMENTS)
_MISTRAL_SYNTAX = CallSyntax(before=f"{mistral.OPENING}[", between=", ", after="]")
_MISTRAL_V11_SYNTAX = CallSyntax(
    opening=mistral.OPENING, head=mistral.ARGUMENTS, closing="", between="", has_quoted_name=False
)
_FUNCTION_GEMMA_MARKERS = (function_gemma.OPENING, function_gemma.CLOSING, function_gemma.STRING_MARK)
_HARMONY_SYNTAX = CallSyntax(
    opening=f"{harmony.CHANNEL}commentary {harmony.RECIPIENT}{harmony.FUNCTIONS}",
    head=f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
    closing="",
    # Where <|call|> ends a text, as in the published checkpoints, there is one call in each answer.
    between=f"{harmony.CALL}{harmony.START}assistant",
    has_quoted_name=False,
)
_HARMONY = CallFormat(
    _read_harmony,
    harmony.MARKERS,
    _HARMONY_SYNTAX,
    _HARMONY_SYNTAX,
    has_channels=True,
    end_markers=(harmony.CALL, harmony.RETURN),
)
_FENCED_SYNTAX = replace(JSON_SYNTAX, before="```json\n", after="\n```")

CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(_read_hermes, _HERMES_MARKERS, _HERMES_SYNTAX, _HERMES_SYNTAX),
    # Its arguments are no JSON, so forced calls are written as Hermes does.
    "qwen3_coder": CallFormat(_read_qwen3_coder, _HERMES_MARKERS, _HERMES_SYNTAX, _HERMES_SYNTAX),
    "llama3_json": CallFormat(
        _read_llama3,
        (llama3.PYTHON_TAG,),
        _LLAMA3_SYNTAX,
        replace(_LLAMA3_SYNTAX, before=llama3.PYTHON_TAG),
    ),
    "mistral": CallFormat(_read_mistral, _MISTRAL_MARKERS, _MISTRAL_SYNTAX, _MISTRAL_SYNTAX),
    "mistral_v11": CallFormat(_read_mistral, _MISTRAL_MARKERS, _MISTRAL_V11_SYNTAX, _MISTRAL_V11_SYNTAX),
    "gemma": CallFormat(_read_gemma, (), JSON_SYNTAX, _FENCED_SYNTAX),
    # Its arguments are no JSON, so forced calls are plain JSON objects.
    "functiongemma": CallFormat(_read_function_gemma, _FUNCTION_GEMMA_MARKERS, JSON_SYNTAX, None),
    "json": CallFormat(_read_json, (), JSON_SYNTAX, _FENCED_SYNTAX),
    "harmony": _HARMONY,
    "gpt-oss": _HARMONY,
    "openai": _HARMONY,
}

REASONING_TAGS: Mapping[str, ThinkTags] = {
    "think": THINK,
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": MISTRAL_THINK,
}
# Formats that tell reasoning without tags.
REASONING_CHANNELS: Mapping[str, CallFormat] = {
    "harmony": _HARMONY,
    "gpt-oss": _HARMONY,
    "openai_gptoss": _HARMONY,
}

# What in a chat template tells the format; the first that is there decides.
_CALL_SIGNS = (
    (harmony.CHANNEL, "harmony"),
    (function_gemma.OPENING, "functiongemma"),
    ("[ARGS]", "mistral_v11"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
    ("<start_of_turn>", "gemma"),
)
_REASONING_SIGNS = (
    (harmony.CHANNEL, "harmony"),
    (MISTRAL_THINK.opening, "mistral"),
    (THINK.opening, "think"),
    (THINK.closing, "think"),
)


def detect_call_format(template: str) -> str:
    """Name of the format that goes with this chat template; `json` if nothing tells."""
    return next((name for sign, name in _CALL_SIGNS if sign in template), "json")


def detect_reasoning(template: str) -> str | None:
    """Name of the tags or channels for reasoning that go with this chat template; None if it knows none."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), None)
