"""Chat messages to prompt text, through transformers' own sandboxed rendering.

`transformers.utils.chat_template_utils` needs 1.0 s and 40 MB to import and brings no torch along (measured
November 2026; a test keeps it so). So the API process renders exactly what `apply_chat_template` would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forkpoint.configs.errors import ConfigError, ModelLoadError, RequestError
from forkpoint.server.text import read_json, token_text

# Names that render() itself gives to the template or to transformers; a request must not.
RESERVED_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """One model's chat template. Rendering may be done from any thread."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """tool_source: the template to use when there are tools, where a model has a second one.

        Raises ModelLoadError if a template is no valid jinja.
        """
        # Imported here: whoever serves completions only, or a model without a template, need not pay the
        # second.
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        self._source = source
        self._tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        self._render_jinja = render_jinja_template
        for text in {self._source, self._tool_source}:
            try:
                render_jinja_template(conversations=[], chat_template=text)  # compiles, renders nothing
            except jinja2.TemplateSyntaxError as exc:
                raise ModelLoadError(
                    f"the chat template is no valid jinja: {exc.message} (line {exc.lineno})",
                    hint="give another one with --chat-template FILE",
                ) from exc
        self._accepts_content_parts = self._probe_content_parts()

    @classmethod
    def load(cls, model_dir: Path, override: Path | None) -> ChatTemplate | None:
        """The template of --chat-template, else the model's; None if there is none.

        Raises ConfigError if `override` cannot be read, ModelLoadError if a template is broken.
        """
        settings = read_json(model_dir / "tokenizer_config.json")
        special_tokens = {
            name: text for name in _SPECIAL_TOKENS if (text := token_text(settings.get(name))) is not None
        }
        if override is not None:
            try:
                return cls(override.read_text(encoding="utf-8"), special_tokens=special_tokens)
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(
                    f"the chat template {override} cannot be read: {exc}",
                    hint="--chat-template takes a file of UTF-8 text",
                ) from exc
        sources = _model_sources(model_dir, settings)
        if "default" not in sources:
            return None
        return cls(sources["default"], special_tokens=special_tokens, tool_source=sources.get("tool_use"))

    @property
    def source(self) -> str:
        """The template's own text, and the one for tools where that is another."""
        return self._source if self._tool_source == self._source else self._source + self._tool_source

    @property
    def accepts_content_parts(self) -> bool:
        """Whether the template reads lists of text parts itself, in every role, all of them and in order.

        If not, render() joins the parts of a message with a newline.
        """
        return self._accepts_content_parts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text of `messages`, which are not changed.

        Most templates write the BOS token themselves; Tokenizer.encode() sees that and does not add another.
        Raises RequestError where the template refuses the messages, and for reserved names in
        template_kwargs.
        """
        template_kwargs = template_kwargs or {}
        if reserved := sorted(RESERVED_NAMES & template_kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs sets {', '.join(reserved)}, which only the server may set",
                param="chat_template_kwargs",
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true; only one of them can be",
                param="continue_final_message",
            )
        try:
            rendered: Any = self._render_jinja(
                conversations=[[self._prepared(message) for message in messages]],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._tool_source if tools else self._source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **template_kwargs},
            )
        # Whatever a template raises, a message made it do so: raise_exception, an undefined name, a filter
        # that meets the wrong type, a range that the sandbox forbids. The template itself was compiled at
        # start.
        except Exception as exc:
            raise RequestError(
                f"the chat template refuses these messages: {exc or type(exc).__name__}", param="messages"
            ) from exc
        texts, _ = rendered
        return str(texts[0])

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy without null fields (templates would print "None", transformers drops them too)."""
        prepared = {key: value for key, value in message.items() if value is not None}
        content = prepared.get("content")
        if isinstance(content, list) and not self._accepts_content_parts:
            prepared["content"] = join_text_parts(content)
        return prepared

    def _probe_content_parts(self) -> bool:
        """Try it: one part must render as the string does, and two parts must both appear, in order."""
        self._accepts_content_parts = True  # so that render() hands the parts on
        for roles in (("system", "user", "assistant"), ("user", "assistant")):
            texts = [(f"probe{role}one", f"probe{role}two") for role in roles]
            try:
                as_strings = self._rendered_probe(roles, [one for one, _ in texts])
            except RequestError:
                continue  # no system role in this template
            try:
                as_parts = self._rendered_probe(roles, [[_text_part(one)] for one, _ in texts])
                in_pairs = self._rendered_probe(
                    roles, [[_text_part(one), _text_part(two)] for one, two in texts]
                )
            except RequestError:
                return False
            places = [in_pairs.find(text) for pair in texts for text in pair]
            return as_strings == as_parts and -1 not in places and places == sorted(places)
        return False

    def _rendered_probe(self, roles: Sequence[str], contents: Sequence[Any]) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return self.render(messages, add_generation_prompt=False)


def join_text_parts(parts: Sequence[Mapping[str, Any]]) -> str:
    """Text of a message's content parts, one per line; all of them, in order.

    Every part must be of type `text`: the server refuses others before. Raises RequestError otherwise.
    """
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"content part of type {part.get('type')!r}: this model reads parts of type 'text' only",
                param="messages",
            )
    return "\n".join(part["text"] for part in parts)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _model_sources(model_dir: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates of a checkpoint by name: `default`, and `tool_use` in some older ones."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    found = settings.get("chat_template") or read_json(model_dir / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    return {entry["name"]: entry["template"] for entry in found or []}
