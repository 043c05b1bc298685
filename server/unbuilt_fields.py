"""Known request fields that are not built yet: refused by name, unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from forkpoint.configs.errors import RequestError

# The neutral values of each field, beside null: with one of them the field asks for nothing.
_OF_BOTH_APIS: dict[str, tuple[object, ...]] = {
    "prompt_logprobs": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "priority": (0,),
}
_OF_CHAT: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "audio": (),
    "modalities": (["text"],),
    "chat_template": (),  # a template from the request would run with the server's rights
}
_OF_COMPLETIONS: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (),  # its neutral value is n
}


def refuse_unbuilt_fields(body: Mapping[str, object], *, is_chat: bool) -> None:
    """Raise RequestError naming the first known field that would have to be ignored."""
    for name, neutral_values in (_OF_BOTH_APIS | (_OF_CHAT if is_chat else _OF_COMPLETIONS)).items():
        value = body.get(name)
        if value is None or any(_is_same(value, neutral) for neutral in neutral_values):
            continue
        if name == "best_of" and _is_same(value, body.get("n", 1)):
            continue
        raise RequestError(
            f"{name} is not supported by this server; leave it out", param=name, code="unsupported_parameter"
        )


def _is_same(value: object, neutral: object) -> bool:
    # In Python 0 == False; in completions `logprobs: 0` asks for something and `logprobs: false` does not.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
