"""The bytes that each token of a vocabulary stands for, read from the decoder in tokenizer.json.

Decoding by bytes is what makes streamed and whole text equal: `tokenizers` decodes strings, and its text of
the first n tokens need not be a prefix of its text of n + 1 (a character may be cut, a space may be
stripped).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from forkpoint.configs.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """How a tokenizer.json turns tokens into text.

    is_byte_level: tokens are spelled in GPT-2's alphabet, one letter a byte (Qwen, Llama 3).
    has_byte_tokens: tokens like <0xE2> stand for one byte (sentencepiece: Gemma, Llama 2).
    replacements: (old, new) pairs for every other token, in order.
    num_stripped_spaces: spaces that sentencepiece put before the text; taken off the start of a whole text,
        never
        off a continuation.
    """

    is_byte_level: bool
    has_byte_tokens: bool
    replacements: tuple[tuple[str, str], ...]
    num_stripped_spaces: int

    @classmethod
    def from_decoder(cls, decoder: dict[str, Any] | None) -> DecodingRules:
        """Read the `decoder` of a tokenizer.json. Raises ModelLoadError for a kind that is not known."""
        rules = cls(is_byte_level=False, has_byte_tokens=False, replacements=(), num_stripped_spaces=0)
        steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
        is_fused = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    rules = replace(rules, is_byte_level=True)
                case {"type": "ByteFallback"}:
                    rules = replace(rules, has_byte_tokens=True)
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                    not is_fused
                ):
                    rules = replace(rules, replacements=(*rules.replacements, (old, new)))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_fused:
                    rules = replace(rules, num_stripped_spaces=start)
                case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": str(scheme)}:
                    stripped = int(scheme != "never")
                    rules = replace(
                        rules, replacements=(*rules.replacements, (old, " ")), num_stripped_spaces=stripped
                    )
                case _:
                    raise ModelLoadError(
                        f"tokenizer.json has the decoder {step!r}, which Forkpoint does not know",
                        hint="use a model with a byte-level or a sentencepiece tokenizer",
                    )
        return rules

    def token_bytes(self, token: str) -> bytes:
        """The bytes of one token as tokenizer.json spells it; incomplete characters stay as they are."""
        if self.has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        # An added token may use letters outside the alphabet: it is plain text then, as in `tokenizers`.
        if self.is_byte_level and all(letter in _BYTE_OF_LETTER for letter in token):
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        return token.encode("utf-8")


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is its own letter, the others are letters from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
