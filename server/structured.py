"""Reads what form a request wants its answer in: response_format and structured_outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from forkpoint.server.errors import clip
from forkpoint.server.fields import Fields, json_type
from forkpoint.server.structured_check import GrammarChecks
from forkpoint.server.structured_rules import OutputRule, literal, schema_rule
from forkpoint.server.structured_schema import read_schema

MAX_REGEX_CHARS = 16 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 64 * 1024

_ANY_OBJECT: dict[str, object] = {"schema": {"type": "object"}}
# Other servers' names, and earlier ones of vLLM's, for what structured_outputs says.
_REPLACED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that an answer must have. param: the field that asks for it."""

    rule: OutputRule
    param: str


async def read_structure(body: Mapping[str, object], checks: GrammarChecks) -> Structure | None:
    """The form that the request asks for; None if any will do. Raises RequestError.

    checks: puts grammars of other syntaxes into ours; whether the whole can be followed is not asked yet.
    """
    fields = Fields(body)
    for name, kind in _REPLACED.items():
        if fields.is_given(name):
            raise fields.error(name, f"is not supported; use structured_outputs: {{{kind!r}: ...}} instead")
    wanted = _read_response_format(fields)
    structured = await _read_structured_outputs(fields, checks)
    if wanted is not None and structured is not None:
        raise fields.error("structured_outputs", "cannot be combined with response_format")
    return wanted or structured


def _read_response_format(fields: Fields) -> Structure | None:
    wanted = fields.object("response_format")
    if wanted is None:
        return None
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        for name in ("schema", "json_schema"):  # llama.cpp reads the first
            if wanted.is_given(name):
                raise wanted.error(name, "is not read with json_object; use type json_schema")
        return Structure(schema_rule(read_schema(Fields(_ANY_OBJECT), "schema")), "response_format")
    if kind == "json_schema":
        named = wanted.object("json_schema")
        if named is None:
            raise wanted.error("json_schema", "is missing")
        named.boolean("strict", default=True)  # enforced either way
        if not named.is_given("schema"):
            raise named.error("schema", "is missing")
        return Structure(schema_rule(read_schema(named, "schema")), "response_format.json_schema.schema")
    shown = clip(repr(kind), 60) if isinstance(kind, str) else json_type(kind)
    raise wanted.error("type", f"is {shown}; it must be text, json_object or json_schema")


async def checked_grammar(rule: OutputRule | None, param: str, checks: GrammarChecks) -> str | None:
    """The grammar's text for the engine, once it is known that it can be followed. Raises RequestError."""
    if rule is None:
        return None
    grammar = rule.text
    await checks.require(grammar, param=param)
    return grammar


async def _read_structured_outputs(fields: Fields, checks: GrammarChecks) -> Structure | None:
    wanted = fields.object("structured_outputs")
    if wanted is None:
        return None
    # A schema may be false; everywhere else that asks for nothing.
    is_neutral = {name: value is False and name != "json" for name, value in wanted.values.items()}
    given = [name for name, value in wanted.values.items() if value is not None and not is_neutral[name]]
    for name in given:
        if name not in _KINDS:
            raise wanted.error(clip(name, 60), f"is not supported; use one of {', '.join(_KINDS)}")
    if not given:
        return None
    if len(given) > 1:
        raise fields.error("structured_outputs", f"has {' and '.join(given)}; only one can be given")
    kind = given[0]
    match kind:
        case "json":
            rule = schema_rule(read_schema(_parsed_schema(wanted), "json"))
        case "json_object":
            wanted.boolean("json_object", default=False)
            rule = schema_rule(read_schema(Fields(_ANY_OBJECT), "schema"))
        case "regex":
            rule = _regex_rule(wanted)
        case "choice":
            rule = _choice_rule(wanted)
        case _:
            rule = await _grammar_rule(wanted, checks)
    return Structure(rule, f"structured_outputs.{kind}")


def _parsed_schema(fields: Fields) -> Fields:
    """The same fields with a schema in place of its text."""
    text = fields.get("json")
    if not isinstance(text, str):
        return fields
    try:
        return Fields({"json": orjson.loads(text)}, fields.prefix)
    except orjson.JSONDecodeError as error:
        raise fields.error("json", f"is no valid JSON: {error}") from error


def _regex_rule(fields: Fields) -> OutputRule:
    """The whole output must match, so anchors at both ends change nothing."""
    pattern = fields.string("regex", max_chars=MAX_REGEX_CHARS)
    assert pattern is not None
    escaped = re.sub(r"\\.|/|\n", _escape_in_regex, pattern, flags=re.DOTALL)
    return OutputRule(f"/{escaped}/")


def _escape_in_regex(match: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(match.group(), match.group())


def _choice_rule(fields: Fields) -> OutputRule:
    choices = fields.get("choice")
    if not isinstance(choices, list) or not choices:
        raise fields.error("choice", f"must be a list of strings, not {json_type(choices)} or empty")
    if len(choices) > MAX_CHOICES:
        raise fields.error("choice", f"has {len(choices)} strings; at most {MAX_CHOICES} are allowed")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise fields.error("choice", "must hold strings alone, and no empty one")
    num_chars = sum(map(len, choices))
    if num_chars > MAX_CHOICE_CHARS:
        raise fields.error("choice", f"has {num_chars} characters; at most {MAX_CHOICE_CHARS} are allowed")
    return OutputRule(" | ".join(map(literal, choices)))


async def _grammar_rule(fields: Fields, checks: GrammarChecks) -> OutputRule:
    """Lark as it is; llama.cpp's GBNF, which vLLM takes in the same field, by its `::=`."""
    text = fields.string("grammar", max_chars=MAX_GRAMMAR_CHARS)
    assert text is not None
    lark = await checks.lark_of(text, param=f"{fields.prefix}grammar") if "::=" in text else text
    named: dict[str, Any] = {"name": "answer", "lark_grammar": lark}
    return OutputRule("@answer", grammars=(named,), alone={"lark_grammar": lark})
