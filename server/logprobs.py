"""Log-probabilities on the wire: the shape of chat, and the older one of text completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forkpoint.server.token_entries import TokenEntry

TokenBytes = Callable[[int], bytes]


def chat_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> dict[str, object]:
    """OpenAI's `ChoiceLogprobs`. `bytes` are exact; `token` shows U+FFFD for a part of a character."""
    return {
        "content": [
            {
                **_chat_token(entry.token_id, entry.logprob, token_bytes),
                "top_logprobs": [_chat_token(token_id, value, token_bytes) for token_id, value in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[TokenEntry], token_bytes: TokenBytes, *, text_offset: int
) -> dict[str, list[object]]:
    """The four columns of legacy completions.

    top_logprobs: null where no log-probability is known, else a dictionary that holds the token itself too.
    text_offset: characters of the text before the one that the entries' offsets count from.
    """
    return {
        "tokens": [legacy_token(token_bytes(entry.token_id)) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_legacy_top(entry, token_bytes) for entry in entries],
        "text_offset": [text_offset + entry.text_offset for entry in entries],
    }


def legacy_token(raw: bytes) -> str:
    """A token as legacy completions spell it: a part of a character as `bytes:\\xe2`, so that keys differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_token(token_id: int, logprob: float | None, token_bytes: TokenBytes) -> dict[str, object]:
    raw = token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def _legacy_top(entry: TokenEntry, token_bytes: TokenBytes) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, value in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(legacy_token(token_bytes(token_id)), value)  # of two spelled alike, the likelier
    return top
