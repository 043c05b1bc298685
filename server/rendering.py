"""How a chat request wants its messages rendered: the options beside the messages, and the text they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forkpoint.server.chat_messages import Message
from forkpoint.server.fields import Fields
from forkpoint.server.text_ports import PromptTemplate

# A chat is rendered about ten times, and every time each name goes into the template's context.
MAX_TEMPLATE_KWARGS = 64


@dataclass(frozen=True, slots=True)
class Rendering:
    """Options of one request. tools: the functions the model may call, as the template reads them."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def text(self, template: PromptTemplate, messages: Sequence[Message]) -> str:
        """The prompt of these messages. Holds the GIL for milliseconds on a long chat: use a worker thread.

        Raises RequestError where the template refuses them.
        """
        return template.render(
            messages,
            tools=self.tools or None,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )


def read_rendering(fields: Fields) -> Rendering:
    """The options that a chat request's body gives. Raises RequestError."""
    continues = fields.boolean("continue_final_message", default=False)
    kwargs: dict[str, Any] = {}
    effort = fields.string("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort  # templates that know no effort ignore it
    given = fields.object("chat_template_kwargs")
    if given is not None:
        if len(given.values) > MAX_TEMPLATE_KWARGS:
            raise fields.error(
                "chat_template_kwargs",
                f"has {len(given.values)} names; at most {MAX_TEMPLATE_KWARGS} are allowed",
            )
        kwargs |= given.values
    return Rendering(
        # Whoever asks for a continuation and says nothing else cannot want a new turn before it.
        add_generation_prompt=fields.boolean("add_generation_prompt", default=not continues),
        continue_final_message=continues,
        add_special_tokens=fields.boolean("add_special_tokens", default=False),
        template_kwargs=kwargs,
    )
