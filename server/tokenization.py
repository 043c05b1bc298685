"""POST /tokenize and /detokenize: what a prompt or a chat is in token ids, and back.

The count is the `usage.prompt_tokens` of the same request; routers ask for it to choose a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkpoint.configs.errors import RequestError
from forkpoint.server.chat_messages import num_characters
from forkpoint.server.errors import ClientGone
from forkpoint.server.fields import Fields, json_type
from forkpoint.server.generation_fields import read_model
from forkpoint.server.services import Services
from forkpoint.server.tools_chat import read_chat
from forkpoint.server.watched import raise_on_disconnect, run_watched

# Ids of one /detokenize request: checked one by one, in a worker thread.
MAX_DETOKENIZED = 500_000

Body = Mapping[str, object]


def tokenization_routes(services: Services) -> APIRouter:
    """Both also below /v1, where SGLang has them. 503 while the engine is not ready."""
    router = APIRouter()

    async def answer_tokenize(_: Request) -> Response:
        return _JsonAnswer(services, lambda body: tokenize(body, services))

    async def answer_detokenize(_: Request) -> Response:
        return _JsonAnswer(services, lambda body: detokenize(body, services))

    for prefix in ("", "/v1"):
        router.add_api_route(f"{prefix}/tokenize", answer_tokenize, methods=["POST"], response_model=None)
        router.add_api_route(f"{prefix}/detokenize", answer_detokenize, methods=["POST"], response_model=None)
    return router


async def tokenize(body: Body, services: Services) -> bytes:
    """The answer's JSON. Raises RequestError.

    Texts are bounded in characters as in generation; one that turns out to have more tokens than the context
    is counted all the same, since that is what the caller wants to know.
    """
    fields = Fields(body)
    read_model(fields, services.config.served_model_names)
    if fields.is_given("messages"):
        text, add_special_tokens = await _render_chat(body, services)
    else:
        prompt = fields.string("prompt")
        if prompt is None:
            raise RequestError("give `prompt` or `messages`", param="prompt")
        text, add_special_tokens = prompt, fields.boolean("add_special_tokens", default=True)
    services.limits.check_num_characters(len(text), services.tokenizer.max_token_characters)
    context_length = services.limits.info.context_length

    def encode() -> bytes:
        token_ids = services.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": context_length}
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

    return await asyncio.to_thread(encode)


async def detokenize(body: Body, services: Services) -> bytes:
    """The answer's JSON: the text twice, as vLLM and as SGLang name it. Raises RequestError."""
    fields = Fields(body)
    read_model(fields, services.config.served_model_names)
    token_ids = fields.get("tokens")
    if not isinstance(token_ids, list):
        raise fields.error("tokens", f"must be a list of token ids, not {json_type(token_ids)}")
    if len(token_ids) > MAX_DETOKENIZED:
        raise fields.error("tokens", f"has {len(token_ids)} ids; at most {MAX_DETOKENIZED} are allowed")
    vocab_size = services.limits.info.vocab_size

    def decode() -> bytes:
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise fields.error("tokens", f"must hold integers in [0, {vocab_size})")
        text = services.tokenizer.decode(token_ids, skip_special_tokens=False)
        return orjson.dumps({"prompt": text, "text": text})

    return await asyncio.to_thread(decode)


async def _render_chat(body: Body, services: Services) -> tuple[str, bool]:
    """The text of a chat, and whether special tokens are to be put around it."""
    if services.template is None:
        raise RequestError("this model has no chat template; give one with --chat-template")
    template, limits = services.template, services.limits
    assert services.dialect is not None, "a template has a dialect"
    chat = read_chat(body, services.dialect, max_pieces=limits.info.context_length)
    limits.check_num_characters(num_characters(chat.messages), services.tokenizer.max_token_characters)
    text = await asyncio.to_thread(chat.rendering.text, template, chat.messages)
    return text, chat.rendering.add_special_tokens


class _JsonAnswer(Response):
    """Reads the body and answers it when it is called, since only then it has `receive`."""

    def __init__(self, services: Services, work: Callable[[Body], Coroutine[Any, Any, bytes]]) -> None:
        super().__init__(media_type="application/json")
        self._services = services
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._services.lifecycle.running_request():
                body = await self._services.bodies.read(scope, receive)
                content = await run_watched(self._work(body), raise_on_disconnect(receive))
        except ClientGone:
            return
        await Response(content, media_type="application/json")(scope, receive, send)
