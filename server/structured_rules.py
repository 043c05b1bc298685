"""Pieces of grammars as llguidance reads them, and how they are put together into one text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from forkpoint.server.parsers.think import ThinkTags

# Id of a special token by its text; None where the tokenizer has no such one, so that it is plain text.
SpecialTokenId = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class OutputRule:
    """What an output must match. expression: in llguidance's variant of Lark.

    rules: that the expression names. grammars: further ones, that it names with @.
    alone: the grammar if nothing else is in it, where there is a shorter form than the expression.
    """

    expression: str
    rules: tuple[str, ...] = ()
    grammars: tuple[Mapping[str, Any], ...] = ()
    alone: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The grammar as llguidance's JSON text."""
        lark = {"lark_grammar": "\n".join([f"start: {self.expression}", *self.rules])}
        grammars = [lark, *self.grammars] if self.alone is None else [self.alone]
        return orjson.dumps({"grammars": grammars}).decode()


def schema_rule(schema: Mapping[str, Any]) -> OutputRule:
    """schema: as read_schema() gives it."""
    return OutputRule(schema_expression(schema), alone={"json_schema": schema})


def schema_expression(schema: Mapping[str, Any]) -> str:
    return f"%json {orjson.dumps(schema).decode()}"


def either(*rules: OutputRule) -> OutputRule:
    """Any one of them; no two may share a rule's name."""
    return OutputRule(
        " | ".join(f"({rule.expression})" for rule in rules),
        tuple(line for rule in rules for line in rule.rules),
        tuple(grammar for rule in rules for grammar in rule.grammars),
    )


def after_thinking(
    rule: OutputRule, tags: ThinkTags, special_id: SpecialTokenId, *, is_open: bool
) -> OutputRule:
    """`rule` after free reasoning between the tags; without it too, unless the prompt has opened it."""
    closing_id = special_id(tags.closing)
    if closing_id is None:
        thought = f"thought[lazy]: /(?s:.*){re.escape(tags.closing).replace('/', chr(92) + '/')}/"
        rest = "thought"
    else:
        thought = "thought: /(?s:.*)/"
        rest = f"thought <[{closing_id}]>"
    thinking = f'{rest} "\\n"{{0,2}}'
    if not is_open:
        thinking = f"({marked_text(tags.opening, (tags.opening,), special_id)} {thinking})?"
    return OutputRule(f"{thinking} ({rule.expression})", (thought, *rule.rules), rule.grammars)


def marked_text(text: str, markers: Sequence[str], special_id: SpecialTokenId) -> str:
    """An expression for a text in which some of `markers` may be special tokens; empty for no text."""
    ids = {marker: token_id for marker in markers if (token_id := special_id(marker)) is not None}
    if not ids:
        return literal(text) if text else ""
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text)
    return " ".join(f"<[{ids[part]}]>" if part in ids else literal(part) for part in parts if part)


def literal(text: str) -> str:
    # Lark's strings have JSON's escapes; DEL stands for itself in JSON and for nothing in Lark.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
