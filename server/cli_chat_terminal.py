"""Where `forkpoint chat` reads and writes: a line editor with history on a terminal, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from forkpoint.server.cli_chat_text import harmless

PROMPT = ">>> "
CONTINUATION = "... "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Reader(Protocol):
    """is_person: somebody sits there; an error then ends the answer, not the program."""

    is_person: bool

    def read_line(self, prompt: str) -> str:
        """The next line, without its end. Raises EOFError after the last, KeyboardInterrupt for Ctrl-C."""
        ...


class LineReader:
    """Plain lines of a pipe or file; shows no prompt."""

    is_person = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read_line(self, prompt: str) -> str:
        line = self._stream.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class EditorReader:
    """A terminal: arrow keys, search, pasted line breaks; Tab completes commands. History lasts as long as
    the program: what people write to a model is nobody else's to read later.
    """

    is_person = True

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory

        completer = WordCompleter(list(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(), completer=completer, complete_while_typing=False
        )

    def read_line(self, prompt: str) -> str:
        return self._session.prompt(prompt)


def make_reader(commands: Sequence[str]) -> Reader:
    return EditorReader(commands) if sys.stdin.isatty() else LineReader(sys.stdin)


class Writer:
    """Answers go to standard output, everything else to standard error, so that a pipe gets answers alone."""

    def __init__(self, answers: TextIO, notes: TextIO) -> None:
        self._answers = answers
        self._notes = notes
        self._is_dim = False
        self._is_line_open = False

    def answer(self, text: str) -> None:
        """Show a piece of an answer, at once."""
        self._set_dim(False)
        self._write(text)

    def reasoning(self, text: str) -> None:
        """Show what the model thinks before it answers: dim on a terminal, and only there."""
        if self._answers.isatty():
            self._set_dim(True)
            self._write(text)

    def end_answer(self) -> None:
        """End the line that the answer left open."""
        self._set_dim(False)
        if self._is_line_open:
            print(file=self._answers, flush=True)
            self._is_line_open = False

    def note(self, text: str) -> None:
        """A line that is not the model's."""
        is_terminal = self._notes.isatty()
        line = harmless(text)
        print(f"{_DIM}{line}{_PLAIN}" if is_terminal else line, file=self._notes, flush=True)

    def _write(self, text: str) -> None:
        # The encoding of the terminal may lack some characters: a "?" there is better than no answer.
        encoding = self._answers.encoding or "utf-8"
        shown = harmless(text).encode(encoding, "replace").decode(encoding)
        print(shown, end="", file=self._answers, flush=True)
        self._is_line_open = not shown.endswith("\n") if shown else self._is_line_open

    def _set_dim(self, is_dim: bool) -> None:
        if is_dim != self._is_dim:
            # Thoughts and answer are kept apart by a line, too: not every terminal can show dim text.
            if self._is_dim and self._is_line_open:
                print(file=self._answers)
                self._is_line_open = False
            print(_DIM if is_dim else _PLAIN, end="", file=self._answers, flush=True)
            self._is_dim = is_dim
