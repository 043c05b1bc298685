"""Checks grammars in a process of its own, for the API process.

A compilation cannot be stopped, and some never end (an integer that is a multiple of 7919 and of 7907: over
five minutes), so whoever asks must be able to kill it. Loading also holds the GIL for a second or more, and
keeps 250 MB for a vocabulary of 262,144 tokens (November 2026), which the API process should not pay.

`python -m forkpoint.scheduler.grammar_worker` speaks frames of 4 bytes of length (big-endian) and UTF-8. It
begins with one when the tokenizer is loaded, then answers each frame that comes in. A question begins with
`?` before a grammar to check, or `>` before one in llama.cpp's GBNF to put into Lark's syntax; an answer with
`+` before what was asked for, or `-` before the reason why not. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from forkpoint.configs.errors import ForkpointError, RequestError
from forkpoint.scheduler.grammar import GrammarCompiler

# Below the engine's threads: a check may wait, a step should not.
NICENESS = 10
MAX_REASON_CHARACTERS = 200
PARENT_CHECK_S = 1.0


def main(arguments: list[str]) -> int:
    """arguments: the model's directory, the size of its vocabulary, and the ids that end a text."""
    model_dir, vocab_size, *eos_token_ids = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server drains first
    os.nice(NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    frames_out = sys.stdout.buffer
    try:
        compiler = GrammarCompiler.load(
            Path(model_dir), int(vocab_size), [int(each) for each in eos_token_ids]
        )
    except ForkpointError as error:
        write_frame(frames_out, f"-{error}")
        return 1
    write_frame(frames_out, "+")
    with contextlib.suppress(BrokenPipeError):
        for question in _frames(sys.stdin.buffer):
            write_frame(frames_out, answer(compiler, question, int(vocab_size)))
    return 0


def answer(compiler: GrammarCompiler, question: str, vocab_size: int) -> str:
    """The answer to one question, as the frames carry them."""
    if question.startswith(">"):
        try:
            return f"+{any_to_lark(question[1:])}"
        except Exception as error:  # the library raises whatever its steps raise
            return f"-it is no valid GBNF: {str(error)[:MAX_REASON_CHARACTERS]}"
    reason = refusal(compiler, question[1:], vocab_size)
    return "+" if reason is None else f"-{reason}"


def refusal(compiler: GrammarCompiler, grammar: str, vocab_size: int) -> str | None:
    """Why `grammar` cannot be used; None if it can. One that no output matches is refused too."""
    try:
        matcher = compiler.matcher(grammar)
        mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        matcher.fill_mask(mask)
    except RequestError as error:
        return str(error)
    return None if mask.any() else "the grammar matches no output at all"


def _end_with_parent() -> None:
    """A compilation that never ends would not see that the input did."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def write_frame(stream: BinaryIO, text: str) -> None:
    content = text.encode("utf-8", "backslashreplace")
    stream.write(struct.pack(">I", len(content)) + content)
    stream.flush()


def _frames(stream: BinaryIO) -> Iterator[str]:
    while len(head := stream.read(4)) == 4:
        yield stream.read(struct.unpack(">I", head)[0]).decode("utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
