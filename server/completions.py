"""/v1/completions: reads a text completion request, and writes its answer as one object or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forkpoint.configs.errors import RequestError
from forkpoint.server.answer_format import AnswerHead, FinishedChoice, WireObject
from forkpoint.server.choice import ChoiceDelta, ChoiceEvent, ChoiceFinished, ChoicePrompt
from forkpoint.server.fields import Fields
from forkpoint.server.generation import GenerationRequest, Prompt
from forkpoint.server.generation_fields import MAX_LOGPROBS, read_generation_options
from forkpoint.server.logprobs import TokenBytes, completion_logprobs
from forkpoint.server.message_pieces import ContentPiece
from forkpoint.server.prompts import TokenIds, encode, read_prompts
from forkpoint.server.services import Services
from forkpoint.server.structured import checked_grammar, read_structure
from forkpoint.server.token_entries import TokenEntry
from forkpoint.server.unbuilt_fields import refuse_unbuilt_fields
from forkpoint.server.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_SEQUENCES = 1024


class CompletionsApi:
    """Reads and answers text completion requests."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def read(self, body: Mapping[str, object]) -> GenerationRequest:
        """Validate everything and tokenise. Raises RequestError."""
        services = self._services
        limits = services.limits
        fields = Fields(body)
        echoes = fields.boolean("echo", default=False)
        options = read_generation_options(
            body,
            served_names=services.config.served_model_names,
            eos_token_ids=services.tokenizer.eos_token_ids,
            vocab_size=limits.info.vocab_size,
            defaults=services.config.sampling_defaults,
            least_max_tokens=0 if echoes else 1,
        )
        options = replace(options, echoes=echoes, num_logprobs=_read_num_logprobs(fields))
        refuse_unbuilt_fields(body, is_chat=False)
        if (structure := await read_structure(body, services.grammars)) is not None:
            grammar = await checked_grammar(structure.rule, structure.param, services.grammars)
            options = replace(options, grammar=grammar)
        add_special_tokens = fields.boolean("add_special_tokens", default=True)
        given_prompts = read_prompts(body.get("prompt"), limits)
        num_sequences = len(given_prompts) * options.num_choices
        if num_sequences > MAX_SEQUENCES:
            raise RequestError(
                f"{len(given_prompts)} prompts with n {options.num_choices} are {num_sequences} sequences; "
                f"a request may have {MAX_SEQUENCES}",
                param="n",
            )
        prompts = []
        for given in given_prompts:
            if isinstance(given, str):
                token_ids = await encode(
                    given, services.tokenizer, limits, add_special_tokens=add_special_tokens
                )
            else:
                token_ids = given
            max_tokens = limits.max_tokens(len(token_ids), options.max_tokens, default=DEFAULT_MAX_TOKENS)
            prompts.append(
                Prompt(token_ids, options.sampling(max_tokens), text=self._text_of(given) if echoes else None)
            )
        return GenerationRequest(options, tuple(prompts))

    def format(self, request: GenerationRequest, created: int) -> CompletionsFormat:
        return CompletionsFormat(
            AnswerHead(f"cmpl-{uuid.uuid4().hex}", created, request.options.model),
            request,
            self._services.tokenizer.token_bytes,
        )

    def _text_of(self, prompt: str | TokenIds) -> str:
        """The prompt as `echo` repeats it: a string as it was given, ids without the special tokens."""
        if isinstance(prompt, str):
            return prompt
        detokenizer = self._services.tokenizer.detokenizer()
        return detokenizer.push(prompt.tolist()) + detokenizer.finish()


def _read_num_logprobs(fields: Fields) -> int | None:
    """How many likely tokens to show in each place; None: no log-probabilities at all."""
    if fields.get("logprobs") is False:
        return None
    return fields.integer("logprobs", low=0, high=MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class CompletionsFormat:
    """OpenAI's `text_completion`, the same object name in answers and chunks."""

    head: AnswerHead
    request: GenerationRequest
    token_bytes: TokenBytes

    @property
    def response_id(self) -> str:
        return self.head.id

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> WireObject:
        return {
            **self.head.as_json("text_completion"),
            "choices": [
                self._choice(
                    choice.finish.index,
                    self._echo(choice.finish.index) + choice.content,
                    self._logprobs(choice.finish.index, choice.entries, choice.prompt_entries),
                    choice.finish,
                )
                for choice in choices
            ],
            "usage": usage.as_json(),
        }

    def chunks(self, event: ChoiceEvent) -> list[WireObject]:
        match event:
            case ChoicePrompt(index, entries):
                logprobs = self._logprobs(index, (), entries)
                return [self._chunk(index, self._echo(index), logprobs, None)]
            case ChoiceDelta(index, pieces, entries):
                text = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
                return [self._chunk(index, text, self._logprobs(index, entries) if entries else None, None)]
            case ChoiceFinished(index):
                return [self._chunk(index, "", None, event)]
            case _:
                return []

    def plain_chunk(self, index: int, text: str) -> WireObject:
        return self._chunk(index, text, None, None)

    def usage_chunk(self, usage: Usage) -> WireObject:
        return {**self.head.as_json("text_completion"), "choices": [], "usage": usage.as_json()}

    def _echo(self, index: int) -> str:
        return self.request.prompt_of(index).text or ""

    def _logprobs(
        self, index: int, entries: Sequence[TokenEntry], prompt_entries: Sequence[TokenEntry] = ()
    ) -> WireObject | None:
        if self.request.options.num_logprobs is None:
            return None
        of_prompt = completion_logprobs(prompt_entries, self.token_bytes, text_offset=0)
        of_answer = completion_logprobs(entries, self.token_bytes, text_offset=len(self._echo(index)))
        return {column: of_prompt[column] + of_answer[column] for column in of_prompt}

    def _chunk(
        self, index: int, text: str, logprobs: WireObject | None, finish: ChoiceFinished | None
    ) -> WireObject:
        return {
            **self.head.as_json("text_completion"),
            "choices": [self._choice(index, text, logprobs, finish)],
        }

    def _choice(
        self, index: int, text: str, logprobs: WireObject | None, finish: ChoiceFinished | None
    ) -> WireObject:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish.finish_reason,
            "stop_reason": None if finish is None else finish.stop_reason,
        }
