"""Text for the terminal of `forkpoint chat`: made harmless, and the line below each answer."""

from __future__ import annotations

from forkpoint.server.chat_client import Account

# What a terminal would obey: C0 but tab and line feed, delete, C1; shown as their pictures where Unicode has
# some. Lone surrogates cannot be written at all.
_PICTURES: dict[int, int] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_REPLACED = [*range(0x80, 0xA0), *range(0xD800, 0xE000)]
_HARMLESS: dict[int, int] = {**_PICTURES, 0x7F: 0x2421, **dict.fromkeys(_REPLACED, 0xFFFD)}


def harmless(text: str) -> str:
    """`text` without anything that could move the cursor, change colours or the title, or ring.

    Each such character is replaced by one that shows it, so that nothing is lost unseen.
    """
    return text.translate(_HARMLESS)


def account_line(account: Account) -> str:
    """What an answer took, on one line; says nothing of what the server did not tell."""
    parts = [_prompt_part(account)]
    if account.first_token_s is not None:
        parts.append(f"first token {account.first_token_s:.2f} s")
    if account.completion_tokens is not None:
        parts.append(_plural(account.completion_tokens, "token"))
    if account.tokens_per_s is not None:
        parts.append(f"{account.tokens_per_s:.1f} tokens/s")
    if account.finish_reason == "length":
        parts.append("cut off at the token limit")
    return "; ".join(part for part in parts if part)


def _prompt_part(account: Account) -> str:
    if account.prompt_tokens is None:
        return ""
    text = f"prompt {_plural(account.prompt_tokens, 'token')}"
    if account.cached_tokens is None or account.computed_tokens is None:
        return text
    rebuilt = "" if account.rebuilt_tokens is None else f"{account.rebuilt_tokens} rebuilt, "
    return f"{text}: {account.cached_tokens} cached, {rebuilt}{account.computed_tokens} computed"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
