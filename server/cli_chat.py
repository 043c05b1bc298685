"""`forkpoint chat`: finds the server and its model, then chats in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing

from forkpoint.configs.chat_settings import ChatSettings
from forkpoint.configs.errors import RemoteError
from forkpoint.server.chat_client import ChatClient, ServerNotReady
from forkpoint.server.cli_chat_session import COMMANDS, ChatSession, wait
from forkpoint.server.cli_chat_terminal import Writer, make_reader
from forkpoint.server.cli_key import read_api_key

_ANSWER_OPTIONS = ("max_tokens", "temperature", "top_p", "seed")


def chat_with_server(settings: ChatSettings, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Chat until /exit or the end of input; returns the exit status. Raises ConfigError, RemoteError."""
    writer = Writer(sys.stdout, sys.stderr)
    with closing(
        ChatClient(settings.url, api_key=read_api_key(settings.api_key, settings.api_key_file))
    ) as client:
        model = settings.model or _first_model(client, writer, sleep)
        reader = make_reader(COMMANDS)
        if reader.is_person:
            writer.note(f"{model} on {client.url}; /help lists the commands, Ctrl-C stops an answer")
        options = {name: value for name in _ANSWER_OPTIONS if (value := getattr(settings, name)) is not None}
        session = ChatSession(
            client, reader, writer, model=model, system=settings.system, options=options, sleep=sleep
        )
        session.run()
    return 0


def _first_model(client: ChatClient, writer: Writer, sleep: Callable[[float], None]) -> str:
    while True:
        try:
            names = client.served_models()
        except ServerNotReady as error:
            wait(error, writer, sleep)
            continue
        if not names:
            raise RemoteError(f"{client.url} lists no model", hint="name one with --model")
        return names[0]
