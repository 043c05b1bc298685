"""All choices of one request: submitted together, merged into one stream of events, given up together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from forkpoint.configs.sampling import SamplingParams
from forkpoint.scheduler.client import EngineClient
from forkpoint.scheduler.messages import Submit
from forkpoint.server.choice import Choice, ChoiceEnding, ChoiceEvent, ChoiceFinished, ChoiceReading, Echo
from forkpoint.server.generation_fields import GenerationOptions
from forkpoint.server.prompts import TokenIds
from forkpoint.server.request_metrics import RequestTimer
from forkpoint.server.stop import StopMatcher
from forkpoint.server.text_ports import TextTokenizer
from forkpoint.server.usage import Usage


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, with the parameters its choices share.

    anchors: see Submit. A text completion has none but its end, which is kept anyway.
    text: of the prompt, where the answer repeats it.
    """

    token_ids: TokenIds
    params: SamplingParams
    anchors: tuple[int, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that passed every check. Choice j of prompt i has index i * n + j."""

    options: GenerationOptions
    prompts: tuple[Prompt, ...]

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of the choice with this index."""
        return self.prompts[index // self.options.num_choices]


class Generator:
    """Submits requests to the engine. One per server: uids are unique for its life."""

    def __init__(self, engine: EngineClient, tokenizer: TextTokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._uids = itertools.count(1)

    def submit(self, request: GenerationRequest, timer: RequestTimer) -> Generation:
        """Hand every choice to the engine, or none. Raises EngineUnavailable (QueueFull, ...)."""
        generation = Generation(self._engine, request)
        try:
            for prompt in request.prompts:
                for choice_index in range(request.options.num_choices):
                    generation.choices.append(
                        self._submit_choice(request, prompt, choice_index, len(generation.choices), timer)
                    )
        except Exception:
            generation.close()
            raise
        return generation

    def _submit_choice(
        self, request: GenerationRequest, prompt: Prompt, choice_index: int, index: int, timer: RequestTimer
    ) -> Choice:
        options = request.options
        mailbox = self._engine.submit(
            Submit(
                uid=next(self._uids),
                token_ids=prompt.token_ids,
                params=prompt.params,
                choice=choice_index,  # within its prompt: draws are the same as if the prompt came alone
                namespace=options.namespace,
                anchors=prompt.anchors,
            )
        )
        return Choice(index, mailbox, self._reading(options, prompt), timer.choice())

    def _reading(self, options: GenerationOptions, prompt: Prompt) -> ChoiceReading:
        return ChoiceReading(
            self._tokenizer.detokenizer(
                skip_special_tokens=options.skips_special_tokens,
                shown_special_tokens=options.shown_special_tokens,
            ),
            StopMatcher(options.stops, include_stop=options.includes_stop),
            ChoiceEnding(options.end_token_ids, options.stop_token_ids),
            min_tokens=options.min_tokens,
            parser=None if options.new_parser is None else options.new_parser(),
            echo=Echo(prompt.token_ids, self._tokenizer.detokenizer()) if options.echoes else None,
        )


class Generation:
    """A running request. Whoever got it must call close(), whatever happened."""

    def __init__(self, engine: EngineClient, request: GenerationRequest) -> None:
        self.choices: list[Choice] = []
        self._engine = engine
        self._request = request

    @property
    def usage(self) -> Usage:
        """Up to now; only grows."""
        first_choices = self.choices[:: self._request.options.num_choices]
        started = [choice.started for choice in first_choices if choice.started is not None]
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._request.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(each.cached_tokens for each in started),
            rebuilt_tokens=sum(each.rebuilt_tokens for each in started),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
        )

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of all choices as they come, until all are finished. Raises what the first raises."""
        async with aclosing(merge([self._events_of(choice) for choice in self.choices])) as merged:
            async for event in merged:
                yield event

    def close(self, *, has_failed: bool = False) -> None:
        """Make the engine give up what is not finished. Idempotent."""
        for choice in self.choices:
            if not choice.is_finished:
                if choice.runs_in_engine:
                    self._engine.abort(choice.uid)
                choice.abandon("error" if has_failed else "abort")

    async def _events_of(self, choice: Choice) -> AsyncGenerator[ChoiceEvent, None]:
        async with aclosing(choice.events()) as events:
            async for event in events:
                if isinstance(event, ChoiceFinished) and choice.runs_in_engine:
                    self._engine.abort(choice.uid)  # after a stop string the engine would go on
                yield event


async def merge(
    sources: Sequence[AsyncGenerator[ChoiceEvent, None]],
) -> AsyncGenerator[ChoiceEvent, None]:
    """What the sources give, as it comes. Holds one event of each at most: a slow reader slows them all."""
    if len(sources) == 1:  # the common case needs no task per event
        async with aclosing(sources[0]) as only:
            async for event in only:
                yield event
        return
    order = {source: i for i, source in enumerate(sources)}
    pending = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: order[pending[task]]):
                source = pending.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                yield event
                pending[asyncio.ensure_future(anext(source))] = source
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()
