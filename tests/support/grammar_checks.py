"""GrammarChecks that compile in this process, for the double whose tokens are bytes."""

from __future__ import annotations

import functools

import numpy as np
import tokenizers
from llguidance.gbnf_to_lark import any_to_lark
from support.text_doubles import EOS, VOCAB_SIZE
from tokenizers import AddedToken, decoders, models

from forkpoint.configs.errors import RequestError
from forkpoint.scheduler.grammar import GrammarCompiler
from forkpoint.scheduler.grammar_worker import refusal


class CompilingChecks:
    """Remembers the grammars that it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def require(self, grammar: str, *, param: str) -> None:
        self.asked.append(grammar)
        if (reason := refusal(byte_compiler(), grammar, VOCAB_SIZE)) is not None:
            raise RequestError(f"{param} cannot be followed: {reason}", param=param)

    async def lark_of(self, gbnf: str, *, param: str) -> str:
        return str(any_to_lark(gbnf))

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@functools.cache
def byte_compiler() -> GrammarCompiler:
    """Its tokens are those of ByteTokenizer."""
    special = ["<bos>", "<eos>", "<special>", "<pad>"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {token: 256 + index for index, token in enumerate(special)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return GrammarCompiler(backend, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def accepts(grammar: str, text: str) -> bool:
    """Whether this text, and nothing after it, is an output that the grammar allows."""
    matcher = byte_compiler().matcher(grammar)
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    for token in [*text.encode(), EOS]:
        matcher.fill_mask(mask)
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        if token != EOS:
            matcher.accept(token)
    return True
