"""The fields that both APIs share: sampling, length, stopping, streaming, and whose cache is used."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forkpoint.configs.errors import RequestError
from forkpoint.configs.sampling import MAX_SEED, MIN_SEED, SamplingParams
from forkpoint.configs.serving import SamplingDefaults
from forkpoint.server.errors import clip
from forkpoint.server.fields import Fields, json_type
from forkpoint.server.message_pieces import NewParser

MAX_CHOICES = 128
MAX_STOPS = 16
# A stop string is searched with a table as long as itself, made for each choice on the event loop.
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_SALT_CHARS = 128
MAX_LOGIT_BIASES = 4096
MAX_BIAS = 100.0
# Far beyond what anybody uses; a bound so that no logit overflows.
MAX_REPETITION_PENALTY = 1e6
# OpenAI's bound; both APIs have it.
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0  # and -2 at the other end
MAX_INT = 2**63 - 1
OPENAI_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What a request asks beside its prompt, validated; only the lengths still depend on the prompt.

    model: the served name to answer with. max_tokens: as asked, None if not. stop_token_ids: the request's
    own. end_token_ids: all that end a sequence, the model's end-of-text ids included unless ignored.
    namespace: what may share cached state with this request (Submit.namespace). num_logprobs: see
    SamplingParams. echoes: the answer begins with the prompt. grammar: what the output must match.
    new_parser: makes the parser of each choice; None: all text is content. shown_special_tokens: special
    tokens that a parser must see although others are skipped.
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
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    num_logprobs: int | None = None
    echoes: bool = False
    grammar: str | None = None
    new_parser: NewParser | None = None
    shown_special_tokens: frozenset[str] = frozenset()

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The parameters of one sequence; max_tokens is what Limits allows it. Raises RequestError."""
        return SamplingParams(
            seed=self.seed,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=self.end_token_ids,
            # An answer that the context cuts short cannot be longer than that either.
            min_tokens=min(self.min_tokens, max_tokens),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            num_logprobs=self.num_logprobs,
            scores_prompt=self.echoes and (self.num_logprobs is not None or max_tokens == 0),
            grammar=self.grammar,
        )


def read_generation_options(
    body: Mapping[str, object],
    *,
    served_names: Sequence[str],
    eos_token_ids: frozenset[int],
    vocab_size: int,
    least_max_tokens: int = 1,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
) -> GenerationOptions:
    """Validate the shared fields. Raises RequestError: 404 for an unknown model, else 400."""
    fields = Fields(body)
    model = read_model(fields, served_names)
    is_stream = fields.boolean("stream", default=False)
    has_usage, has_continuous_usage = _read_stream_options(fields, is_stream=is_stream)
    stop_token_ids = _read_stop_token_ids(fields, vocab_size)
    ignores_eos = fields.boolean("ignore_eos", default=False)
    top_k = fields.integer("top_k", low=-1, high=MAX_INT)
    top_p = fields.number("top_p", default=defaults.top_p, low=0.0, high=1.0)
    if top_p == 0.0:
        raise fields.error("top_p", "is 0; it must be in (0, 1]")
    seed = fields.integer("seed", low=MIN_SEED, high=MAX_SEED)
    salt = fields.string("cache_salt", max_chars=MAX_SALT_CHARS)
    max_tokens = fields.integer("max_tokens", low=least_max_tokens, high=MAX_INT)
    max_completion_tokens = fields.integer("max_completion_tokens", low=least_max_tokens, high=MAX_INT)
    if max_completion_tokens is not None:
        max_tokens = max_completion_tokens
    min_tokens = fields.integer("min_tokens", low=0, high=MAX_INT) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.error("min_tokens", f"is {min_tokens}, more than max_tokens {max_tokens}")
    return GenerationOptions(
        model=model,
        num_choices=fields.integer("n", low=1, high=MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        temperature=fields.number("temperature", default=defaults.temperature, low=0.0, high=MAX_TEMPERATURE),
        top_p=top_p,
        top_k=defaults.top_k if top_k is None else max(top_k, 0),
        min_p=fields.number("min_p", default=defaults.min_p, low=0.0, high=1.0),
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
        min_tokens=min_tokens,
        presence_penalty=fields.number("presence_penalty", default=0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        frequency_penalty=fields.number("frequency_penalty", default=0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        repetition_penalty=fields.number(
            "repetition_penalty",
            default=defaults.repetition_penalty,
            low=1 / MAX_REPETITION_PENALTY,
            high=MAX_REPETITION_PENALTY,
        ),
        logit_bias=_read_logit_bias(fields, vocab_size),
    )


def read_model(fields: Fields, served_names: Sequence[str]) -> str:
    """The served name that `model` asks for; the default one if it is absent. Raises RequestError (404)."""
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


def _read_logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias")
    if biases is None:
        return ()
    if len(biases.values) > MAX_LOGIT_BIASES:
        raise fields.error(
            "logit_bias", f"has {len(biases.values)} ids; at most {MAX_LOGIT_BIASES} are allowed"
        )
    by_id: dict[int, float] = {}
    for key in biases.values:
        # int() would take "1_0", " 7" and the digits of other scripts; 20 digits are beyond every vocabulary.
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 20 else -1
        if not 0 <= token_id < vocab_size:
            raise fields.error(
                "logit_bias", f"has the key {clip(repr(key), 60)}; keys are token ids in [0, {vocab_size})"
            )
        value = biases.number(clip(key, 60), default=math.nan, low=-MAX_BIAS, high=MAX_BIAS)
        if math.isnan(value):
            raise fields.error("logit_bias", f"has no number for the id {token_id}")
        if token_id in by_id:  # "7" and "07"
            raise fields.error("logit_bias", f"names the id {token_id} twice")
        by_id[token_id] = value
    return tuple(by_id.items())


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
