"""Values as Python writes them, and as FunctionGemma does with marks around its strings; to JSON's types."""

from __future__ import annotations

import re
from typing import Any

MAX_DEPTH = 64

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_WORDS: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False}
_WORDS |= {"None": None, "null": None}
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class LiteralReader:
    """Reads a text from front to back. Every method raises ValueError where the text says something else."""

    def __init__(self, text: str, *, string_mark: str | None = None) -> None:
        """string_mark: stands before and after each string, which has no escapes; None: Python's quotes."""
        self._text = text
        self._string_mark = string_mark
        self._at = 0

    def python_calls(self) -> list[tuple[str, dict[str, Any]]]:
        """All of the text: `f(a=1)`, several of them, or a list; each may be inside of print()."""
        calls = []
        is_list = self._takes("[")
        while not self._is_at_end() and not (is_list and self._takes("]")):
            name = self._match(_IDENTIFIER)
            self._need("(")
            if name == "print":
                calls.append((self._match(_IDENTIFIER), self._keyword_arguments(after="(")))
                self._need(")")
            else:
                calls.append((name, self._keyword_arguments()))
            if not self._takes(","):
                self._takes(";")
        if not self._is_at_end():
            raise ValueError("more text after the calls")
        return calls

    def object(self) -> dict[str, Any]:
        """All of the text: one object in braces."""
        self._need("{")
        value = self._pairs("}", 0)
        if not self._is_at_end():
            raise ValueError("more text after the object")
        return value

    def _keyword_arguments(self, after: str | None = None) -> dict[str, Any]:
        if after is not None:
            self._need(after)
        arguments: dict[str, Any] = {}
        while not self._takes(")"):
            name = self._match(_IDENTIFIER)
            self._need("=")
            arguments[name] = self._value(0)
            if not self._takes(","):
                self._need(")")
                break
        return arguments

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self._takes("{"):
            return self._pairs("}", depth + 1)
        for opening, closing in (("[", "]"), ("(", ")")):
            if self._takes(opening):
                return self._items(closing, depth + 1)
        if self._is_at_string():
            return self._string()
        self._skip_space()
        if match := _NUMBER.match(self._text, self._at):
            self._at = match.end()
            digits = match.group().lstrip("+")
            return int(digits) if re.fullmatch(r"-?\d{1,300}", digits) else float(digits)
        word = self._match(_NAME)
        if word in _WORDS:
            return _WORDS[word]
        raise ValueError(f"not a value: {word}")

    def _pairs(self, closing: str, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self._takes(closing):
            key = self._string() if self._is_at_string() else self._match(_NAME)
            self._need(":")
            pairs[key] = self._value(depth)
            if not self._takes(","):
                self._need(closing)
                break
        return pairs

    def _items(self, closing: str, depth: int) -> list[Any]:
        items = []
        while not self._takes(closing):
            items.append(self._value(depth))
            if not self._takes(","):
                self._need(closing)
                break
        return items

    def _is_at_string(self) -> bool:
        self._skip_space()
        marks = ('"', "'") if self._string_mark is None else (self._string_mark,)
        return self._text.startswith(marks, self._at)

    def _string(self) -> str:
        if self._string_mark is not None:
            start = self._at + len(self._string_mark)
            end = self._text.find(self._string_mark, start)
            if end < 0:
                raise ValueError("a string has no end")
            self._at = end + len(self._string_mark)
            return self._text[start:end]
        quote = self._text[self._at]
        if self._text.startswith(quote * 3, self._at):
            quote *= 3
        pattern = re.compile(rf"(?:[^\\]|\\.)*?{quote}", re.DOTALL)
        match = pattern.match(self._text, self._at + len(quote))
        if match is None:
            raise ValueError("a string has no end")
        self._at = match.end()
        return _ESCAPE.sub(_unescape, match.group()[: -len(quote)])

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip_space()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"unexpected text at {self._at}")
        self._at = match.end()
        return match.group()

    def _takes(self, literal: str) -> bool:
        self._skip_space()
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def _need(self, literal: str) -> None:
        if not self._takes(literal):
            raise ValueError(f"no {literal!r} at {self._at}")

    def _is_at_end(self) -> bool:
        self._skip_space()
        return self._at == len(self._text)

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1) or match.group(2)
    if code is not None:
        return chr(int(code, 16))
    return _ESCAPED.get(match.group(3), match.group(3) if match.group(3) in "\\'\"" else match.group())
