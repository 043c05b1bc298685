"""The chat of `forkpoint chat`: its messages, its commands, one answer after the other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from forkpoint.configs.errors import RemoteError
from forkpoint.server.chat_client import Account, ChatClient, Message, Piece, ServerNotReady
from forkpoint.server.cli_chat_terminal import CONTINUATION, PROMPT, Reader, Writer
from forkpoint.server.cli_chat_text import account_line

HELP = """\
/help           show this (also /?)
/reset          forget the chat, keep the system prompt (also /clear)
/system TEXT    set the system prompt; alone: show it; `/system -` takes it away
/retry          answer the last message again (also /regen)
/undo           take the last message and its answer back
/exit           end (also /quit, /bye, Ctrl-D)
\"\"\"             begins and ends a message of several lines
Ctrl-C          stop the answer; what there is of it stays in the chat
"""
COMMANDS = ("/help", "/reset", "/clear", "/system", "/retry", "/regen", "/undo", "/exit", "/quit", "/bye")
_QUOTES = '"""'
# `/etc/hosts: what is it?` and `/ 2` are messages.
_COMMAND = re.compile(r"/(\?|[a-z]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(slots=True)
class Conversation:
    """What has been said; mutable. unanswered: the last message if it got no answer; it is not sent again
    unless asked for, because two messages of one role in a row are refused by many templates.
    """

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    unanswered: str | None = None

    def messages_with(self, text: str) -> list[Message]:
        """What to send for one more message of the user."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns, {"role": "user", "content": text}]

    def add(self, text: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.unanswered = None

    def take_back(self) -> str | None:
        """The last message of the user, which is taken out with its answer; None if there is none."""
        if self.unanswered is not None:
            text, self.unanswered = self.unanswered, None
            return text
        if not self.turns:
            return None
        text = self.turns[-2]["content"]
        del self.turns[-2:]
        return text

    def reset(self) -> None:
        self.turns.clear()
        self.unanswered = None


class ChatSession:
    """Reads messages and commands until the end of input or /exit."""

    def __init__(
        self,
        client: ChatClient,
        reader: Reader,
        writer: Writer,
        *,
        model: str,
        system: str | None = None,
        options: Mapping[str, object],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """options: further fields of every request."""
        self._client = client
        self._reader = reader
        self._writer = writer
        self._model = model
        self._options = options
        self._sleep = sleep
        self._conversation = Conversation(system)

    def run(self) -> None:
        """Chat. Raises RemoteError only where no person could try again."""
        while (text := self._read_message()) is not None:
            if not text.strip():
                continue
            command = _COMMAND.fullmatch(text)
            if command is None:
                self._answer(text)
            elif not self._obey(command[1], (command[2] or "").strip()):
                return

    def _read_message(self) -> str | None:
        """One line, or the lines between triple quotes; None at the end."""
        lines: list[str] = []
        is_quoted = False
        while True:
            try:
                line = self._reader.read_line(CONTINUATION if is_quoted else PROMPT)
            except EOFError:
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                if not self._reader.is_person:
                    raise
                self._writer.note("Ctrl-D or /exit ends the chat")
                lines, is_quoted = [], False
                continue
            if not is_quoted and line.startswith(_QUOTES):
                line, is_quoted = line.removeprefix(_QUOTES), True
            if is_quoted and line.endswith(_QUOTES):
                return "\n".join([*lines, line.removesuffix(_QUOTES)])
            if not is_quoted:
                return line
            lines.append(line)

    def _obey(self, command: str, argument: str) -> bool:
        """Do what the command says; False if it ends the chat."""
        chat = self._conversation
        if command in ("exit", "quit", "bye"):
            return False
        if command in ("help", "?"):
            self._writer.note(HELP.rstrip("\n"))
        elif command in ("reset", "clear"):
            chat.reset()
            self._writer.note("the chat is forgotten")
        elif command == "system":
            self._set_system(argument)
        elif command in ("retry", "regen"):
            text = chat.take_back()
            if text is None:
                self._writer.note("there is no message to answer again")
            else:
                self._answer(text)
        elif command == "undo":
            self._writer.note("there is nothing to undo" if chat.take_back() is None else "taken back")
        else:
            self._writer.note(f"there is no command /{command}; /help lists them")
        return True

    def _set_system(self, text: str) -> None:
        chat = self._conversation
        if not text:
            self._writer.note("no system prompt" if chat.system is None else f"system prompt: {chat.system}")
            return
        chat.system = None if text == "-" else text
        self._writer.note("the system prompt is taken away" if chat.system is None else "system prompt set")

    def _answer(self, text: str) -> None:
        """Get and show the answer to `text`; both become part of the chat unless there is no answer."""
        chat = self._conversation
        try:
            answer, account, is_stopped = self._stream(chat.messages_with(text))
        except RemoteError as error:
            self._writer.end_answer()
            chat.unanswered = text
            if not self._reader.is_person:
                raise
            self._writer.note(f"error: {error}")
            self._writer.note(f"hint: {error.hint}" if error.hint else "/retry sends the message again")
            return
        self._writer.end_answer()
        if is_stopped and not answer:
            chat.unanswered = text
            self._writer.note("stopped; /retry sends the message again")
            return
        chat.add(text, answer)
        if is_stopped:
            self._writer.note("stopped; what there is of the answer stays in the chat (/undo takes it back)")
        elif line := account_line(account):
            self._writer.note(line)

    def _stream(self, messages: list[Message]) -> tuple[str, Account, bool]:
        """Show an answer as it comes. Returns its text, what it took, and whether Ctrl-C stopped it."""
        texts: list[str] = []
        while True:
            answer = self._client.answer(self._model, messages, self._options)
            try:
                with closing(answer.pieces) as pieces:
                    for piece in pieces:
                        self._show(piece, texts)
                return "".join(texts), answer.account, False
            except ServerNotReady as error:
                try:
                    wait(error, self._writer, self._sleep)
                except KeyboardInterrupt:
                    return "", answer.account, True
            except KeyboardInterrupt:
                return "".join(texts), answer.account, True

    def _show(self, piece: Piece, texts: list[str]) -> None:
        if piece.kind == "reasoning":
            self._writer.reasoning(piece.text)
        else:
            texts.append(piece.text)
            self._writer.answer(piece.text)


def wait(error: ServerNotReady, writer: Writer, sleep: Callable[[float], None]) -> None:
    """Say why there is no answer yet, and wait as long as the server asks for."""
    writer.note(f"waiting: {error}")
    sleep(error.retry_after_s)
