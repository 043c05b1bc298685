"""The server that is measured: what it serves, how it counts tokens, how it is asked.

What differs between servers is found out here, by asking: which of /tokenize's forms it has, whether it takes
ignore_eos, whether the model chats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from forkpoint.configs.bench_settings import BenchSettings
from forkpoint.configs.errors import ConfigError, RemoteError
from forkpoint.server.bench.record import Answer
from forkpoint.server.bench.stream import AnswerStream
from forkpoint.server.bench.wire import Response, WireClient, WireError
from forkpoint.server.bench.words import (
    CountedTexts,
    ScaledTexts,
    TextSource,
    measure_pieces,
    random_words,
    text_rng,
)
from forkpoint.server.bench.workload import Conversation
from forkpoint.server.chat_client import message_of, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ASIDE_TIMEOUT_S = 60.0
_PROBE_WORDS = (40, 240)
_SHOWN_MODELS = 8

Messages = list[dict[str, str]]


@dataclass(slots=True)
class Target:
    """One server and model. Mutable: what it cannot do is learnt, and `notes` says so to people."""

    wire: WireClient
    settings: BenchSettings
    model: str
    uses_chat: bool
    tokenizer: Tokenizer | None = None
    ignores_eos: bool = True
    notes: list[str] = field(default_factory=list)

    @classmethod
    async def connect(cls, wire: WireClient, settings: BenchSettings) -> Target:
        """Find the model and how to ask it. Raises RemoteError, ConfigError."""
        model = await _find_model(wire, settings)
        wants_chat = settings.endpoint == "chat" or (
            settings.endpoint == "auto" and settings.workload == "chat"
        )
        tokenizer = None if settings.tokenizer is None else _load_tokenizer(settings.tokenizer)
        target = cls(wire, settings, model, uses_chat=wants_chat, tokenizer=tokenizer)
        if settings.prompt_format == "ids" and (wants_chat or tokenizer is None):
            raise ConfigError(
                "--prompt-format ids needs --tokenizer, and the completions endpoint",
                hint="give --tokenizer DIRECTORY, or leave --prompt-format out",
            )
        await target._probe()
        return target

    @property
    def _sends_ids(self) -> bool:
        return not self.uses_chat and self.tokenizer is not None and self.settings.prompt_format != "text"

    async def texts(self) -> TextSource:
        """Texts of exact lengths if anybody counts tokens (--tokenizer, the server); else of about those."""
        if self.tokenizer is not None:
            tokenizer = self.tokenizer

            async def count_here(text: str, *, is_whole_prompt: bool) -> int:
                return len(tokenizer.encode(text, add_special_tokens=is_whole_prompt).ids)

            return CountedTexts(count_here, await measure_pieces(count_here))
        for form in ("openai", "llama"):
            if await self._count(form, "Is it there?", is_whole_prompt=False) is None:
                continue

            async def count_there(text: str, *, is_whole_prompt: bool, form: str = form) -> int:
                count = await self._count(form, text, is_whole_prompt=is_whole_prompt)
                if count is None:
                    raise RemoteError("the server's /tokenize stopped to answer")
                return count

            return CountedTexts(count_there, await measure_pieces(count_there))
        self.notes.append(
            "the server has no /tokenize: lengths of prompts are about right (--tokenizer makes them exact)"
        )
        return await self._scaled_texts()

    async def flush_cache(self) -> None:
        """Raises RemoteError if the server has no way to, or will not."""
        for path in ("/flush_cache", "/reset_prefix_cache"):
            response = await self._ask("POST", path)
            if response.status == 200:
                return
            if response.status not in (404, 405):
                raise RemoteError(f"{path}: {_fault_of(response)}")
        raise RemoteError(
            "this server cannot empty its prefix cache over HTTP",
            hint="leave --flush-cache out and take another --seed for each run",
        )

    async def answer(self, conversation: Conversation, history: Sequence[tuple[str, str]]) -> Answer:
        """Ask the next question of a conversation after these (question, answer) turns. Never raises."""
        path, body = self.request_of(conversation, history)
        return await self._stream(path, body)

    def request_of(
        self, conversation: Conversation, history: Sequence[tuple[str, str]]
    ) -> tuple[str, dict[str, Any]]:
        """Path and body of that request."""
        question = conversation.questions[len(history)]
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.settings.output_tokens,
            "temperature": self.settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.uses_chat:
            body["messages"] = _messages(conversation, history, question)
            return "/v1/chat/completions", body
        text = _as_text(conversation, history, question)
        body["prompt"] = text if not self._sends_ids else self._ids(text)
        return "/v1/completions", body

    def _ids(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    async def _probe(self) -> None:
        """Ask for one token, so that what the server cannot do is known before anything is measured."""
        probe = Conversation(0, None, "", ("Say a word.",), is_plain=True)
        for _ in range(3):
            answer = await self.answer(probe, ())
            error = answer.error
            if error is None or "the answer is empty" in error:
                return
            if self.ignores_eos and "ignore_eos" in error:
                self.ignores_eos = False
                self.notes.append("the server refuses ignore_eos: answers may be shorter than asked for")
            elif self.uses_chat and self.settings.endpoint == "auto" and "template" in error.lower():
                self.uses_chat = False
                self.notes.append("the model has no chat template: chats go to /v1/completions as plain text")
            else:
                raise RemoteError(f"a first request failed: {error}")
        raise RemoteError(f"a first request failed: {error}")

    async def _stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        stream = AnswerStream()
        sent_s = 0.0

        def note_sent(now_s: float) -> None:
            nonlocal sent_s
            sent_s = now_s

        try:
            response = await self.wire.request(
                "POST",
                path,
                orjson.dumps(body),
                timeout_s=self.settings.timeout_s,
                sink=lambda piece, now_s: stream.feed(piece, now_s - sent_s),
                on_sent=note_sent,
            )
        except WireError as error:
            return stream.answer(str(error))
        return stream.answer(None if response.status == 200 else _fault_of(response))

    async def _count(self, form: str, text: str, *, is_whole_prompt: bool) -> int | None:
        """Tokens of a text as one form of /tokenize counts them; None if the server does not know it."""
        if form == "openai":
            body = {"model": self.model, "prompt": text, "add_special_tokens": is_whole_prompt}
        else:
            body = {"content": text, "add_special": is_whole_prompt}
        response = await self._ask("POST", "/tokenize", body)
        if response.status != 200:
            return None
        try:
            answer = orjson.loads(response.body)
            tokens = answer["tokens"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
        # llama.cpp answers a body that it does not understand with no tokens at all.
        return len(tokens) if isinstance(tokens, list) and tokens else None

    async def _scaled_texts(self) -> TextSource:
        counts = []
        for num_words in _PROBE_WORDS:
            text = random_words(num_words, text_rng(0, "probe", num_words))
            answer = await self.answer(Conversation(0, None, "", (text,), is_plain=True), ())
            if answer.prompt_tokens is None:
                raise RemoteError(
                    "the server neither counts tokens (/tokenize) nor tells a prompt's in `usage`",
                    hint="give --tokenizer, a directory with the model's tokenizer.json",
                )
            counts.append(answer.prompt_tokens)
        per_word = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
        return ScaledTexts(max(per_word, 0.1), counts[0] - per_word * _PROBE_WORDS[0])

    async def _ask(self, method: str, path: str, body: object = None) -> Response:
        try:
            content = b"" if body is None else orjson.dumps(body)
            return await self.wire.request(method, path, content, timeout_s=ASIDE_TIMEOUT_S)
        except WireError as error:
            raise RemoteError(f"{self.settings.base_url}{path}: {error}") from error


async def _find_model(wire: WireClient, settings: BenchSettings) -> str:
    try:
        response = await wire.request("GET", "/v1/models", timeout_s=ASIDE_TIMEOUT_S)
    except WireError as error:
        raise RemoteError(
            f"no server answers at {settings.base_url}: {error}",
            hint="start one with `forkpoint serve`, or give its address with --base-url",
        ) from error
    if response.status == 401:
        raise RemoteError("the server wants a key", hint="give --api-key or --api-key-file")
    if response.status != 200:
        raise RemoteError(f"{settings.base_url}/v1/models: {_fault_of(response)}")
    try:
        names = [str(model["id"]) for model in orjson.loads(response.body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise RemoteError(
            f"{settings.base_url}/v1/models answers with no list of models",
            hint="is it an OpenAI-compatible server? --base-url takes the address before /v1",
        ) from error
    if settings.model is None:
        if not names:
            raise RemoteError("the server lists no model", hint="name one with --model")
        return names[0]
    if names and settings.model not in names:
        raise ConfigError(
            f"the server does not serve {settings.model!r}",
            hint=f"it serves {', '.join(names[:_SHOWN_MODELS])}",
        )
    return settings.model


def _load_tokenizer(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"--tokenizer {directory}: no tokenizer.json can be read there ({one_line(error)})",
            hint="give the model's directory",
        ) from error


def _messages(conversation: Conversation, history: Sequence[tuple[str, str]], question: str) -> Messages:
    messages: Messages = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for asked, answered in history:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": question})
    return messages


def _as_text(conversation: Conversation, history: Sequence[tuple[str, str]], question: str) -> str:
    if conversation.is_plain:
        return conversation.system + question
    parts = [conversation.system] if conversation.system else []
    for asked, answered in history:
        parts.append(f"\n\nUser: {asked}\n\nAssistant:{answered}")
    return "".join([*parts, f"\n\nUser: {question}\n\nAssistant:"])


def _fault_of(response: Response) -> str:
    try:
        body = orjson.loads(response.body)
    except orjson.JSONDecodeError:
        body = None
    text = response.body.decode("utf-8", "replace")
    return f"status {response.status}: {message_of(body) or one_line(text)[:200] or 'no message'}"
