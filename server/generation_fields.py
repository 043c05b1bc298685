"""The fields that both APIs share: sampling, length, stopping, streaming, and whose cache is used."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forkpoint.configs.errors import RequestError
from forkpoint.configs.sampling import MAX_SEED, MIN_SEED, SamplingParams
from forkpoint.server.errors import clip
from forkpoint.server.fields import Fields, json_type

MAX_CHOICES = 128
MAX_STOPS = 16
# A stop string is searched with a table as long as itself, made for each choice on the event loop.
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_SALT_CHARS = 128
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What a request asks beside its prompt, validated; only the lengths still depend on the prompt.

    model: the served name to answer with. max_tokens: as asked, None if not. stop_token_ids: the request's
    own. end_token_ids: all that end a sequence, the model's end-of-text ids included unless ignored.
    namespace: what may share cached state with this request (Submit.namespace).
    """

    model: str
    num_choices: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    namespace: str
    is_stream: bool
    has_usage: bool
    has_continuous_usage: bool
    includes_stop: bool
    skips_special_tokens: bool

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The parameters of one sequence; max_tokens is what Limits allows it."""
        return SamplingParams(
            seed=self.seed,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=self.end_token_ids,
        )


def read_generation_options(
    body: Mapping[str, object],
    *,
    served_names: Sequence[str],
    eos_token_ids: frozenset[int],
    vocab_size: int,
) -> GenerationOptions:
    """Validate the shared fields. Raises RequestError: 404 for an unknown model, else 400."""
    fields = Fields(body)
    model = _read_model(fields, served_names)
    is_stream = fields.boolean("stream", default=False)
    has_usage, has_continuous_usage = _read_stream_options(fields, is_stream=is_stream)
    stop_token_ids = _read_stop_token_ids(fields, vocab_size)
    ignores_eos = fields.boolean("ignore_eos", default=False)
    top_k = fields.integer("top_k", low=-1, high=_MAX_INT)
    top_p = fields.number("top_p", default=1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise fields.error("top_p", "is 0; it must be in (0, 1]")
    seed = fields.integer("seed", low=MIN_SEED, high=MAX_SEED)
    salt = fields.string("cache_salt", max_chars=MAX_SALT_CHARS)
    max_tokens = fields.integer("max_tokens", low=1, high=_MAX_INT)
    max_completion_tokens = fields.integer("max_completion_tokens", low=1, high=_MAX_INT)
    return GenerationOptions(
        model=model,
        num_choices=fields.integer("n", low=1, high=MAX_CHOICES) or 1,
        max_tokens=max_tokens if max_completion_tokens is None else max_completion_tokens,
        temperature=fields.number("temperature", default=1.0, low=0.0, high=2.0),
        top_p=top_p,
        top_k=0 if top_k is None else max(top_k, 0),
        min_p=fields.number("min_p", default=0.0, low=0.0, high=1.0),
        seed=secrets.randbits(63) if seed is None else seed,
        stops=_read_stops(fields),
        stop_token_ids=stop_token_ids,
        end_token_ids=stop_token_ids if ignores_eos else stop_token_ids | eos_token_ids,
        # The tag keeps a salt apart from every other thing that may become part of a namespace.
        namespace="" if salt is None else f"salt:{salt}",
        is_stream=is_stream,
        has_usage=has_usage,
        has_continuous_usage=has_continuous_usage,
        includes_stop=fields.boolean("include_stop_str_in_output", default=False),
        skips_special_tokens=fields.boolean("skip_special_tokens", default=True),
    )


def _read_model(fields: Fields, served_names: Sequence[str]) -> str:
    name = fields.string("model")
    if name is None:
        return served_names[0]
    if name not in served_names:
        raise unknown_model(name)
    return name


def unknown_model(name: str) -> RequestError:
    return RequestError(
        f"the model {clip(name, 200)!r} is not served here; see /v1/models",
        status=404,
        param="model",
        code="model_not_found",
    )


def _read_stream_options(fields: Fields, *, is_stream: bool) -> tuple[bool, bool]:
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not is_stream:
        raise fields.error("stream_options", "needs `stream: true`")
    has_usage = options.boolean("include_usage", default=False)
    return has_usage, options.boolean("continuous_usage_stats", default=False) and has_usage


def _read_stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise fields.error("stop", f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not isinstance(stop, str):
            raise fields.error("stop", f"must be a string or a list of strings, not {json_type(stop)}")
        if stop == "":
            raise fields.error("stop", "must not hold an empty string")
        if len(stop) > MAX_STOP_CHARS:
            raise fields.error(
                "stop", f"has a string of {len(stop)} characters; at most {MAX_STOP_CHARS} are allowed"
            )
    return tuple(stops)


def _read_stop_token_ids(fields: Fields, vocab_size: int) -> frozenset[int]:
    value = fields.get("stop_token_ids")
    if value is None:
        return frozenset()
    if not isinstance(value, list):
        raise fields.error("stop_token_ids", f"must be a list of token ids, not {json_type(value)}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise fields.error(
            "stop_token_ids", f"has {len(value)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    for token_id in value:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise fields.error("stop_token_ids", f"must hold integers in [0, {vocab_size})")
    return frozenset(value)
