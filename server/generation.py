"""All choices of one request: submitted together, read as one stream of events, given up together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from forkpoint.configs.errors import EngineDied
from forkpoint.configs.sampling import SamplingParams
from forkpoint.scheduler.client import EngineClient
from forkpoint.scheduler.messages import Submit
from forkpoint.server.choice import Choice, ChoiceEnding, ChoiceEvent, ChoiceReading, Echo
from forkpoint.server.errors import GenerationFailed
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
        self.request = request
        self.choices: list[Choice] = []
        self._engine = engine

    @property
    def usage(self) -> Usage:
        """Up to now; only grows."""
        first_choices = self.choices[:: self.request.options.num_choices]
        started = [choice.started for choice in first_choices if choice.started is not None]
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.request.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(each.cached_tokens for each in started),
            rebuilt_tokens=sum(each.rebuilt_tokens for each in started),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
        )

    async def events(self) -> AsyncGenerator[list[ChoiceEvent], None]:
        """The events of all choices as they come, those of one moment together, until all are finished.

        Raises what the first choice raises, after the events that came before it. A reader that does not
        come back soon gets more at once: tokens wait in the mailboxes, where they merge.
        """
        news = _News()
        for choice in self.choices:
            choice.on_news(news.tell)
        running = list(self.choices)
        while running:
            await news.wait()
            events: list[ChoiceEvent] = []
            failure: Exception | None = None
            try:
                for choice in running:
                    events += choice.take()
            except (GenerationFailed, EngineDied) as error:
                failure = error
            for choice in running:
                if choice.is_finished and choice.runs_in_engine:
                    self._engine.abort(choice.uid)  # after a stop string the engine would go on
            running = [choice for choice in running if not choice.is_finished]
            if events:
                yield events
            if failure is not None:
                raise failure

    def close(self, *, has_failed: bool = False) -> None:
        """Make the engine give up what is not finished. Idempotent."""
        for choice in self.choices:
            if not choice.is_finished:
                if choice.runs_in_engine:
                    self._engine.abort(choice.uid)
                choice.abandon("error" if has_failed else "abort")


class _News:
    """An asyncio.Event for one waiter that clears itself; takes half as long, and that for every token."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_told = False
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        self._is_told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return at once if tell() was called since the last wait(), else when it is."""
        if not self._is_told:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._is_told = False
