"""Grammars that an output must match: compiled, checked and followed with llguidance.

Both processes use this module: the API process refuses a grammar with check() before it queues the request,
the engine process follows one matcher per sequence. It imports no torch.

A grammar works on the bytes of tokens, and takes them from the same table as our detokenizer, so what it
allows is what the client reads. Where it leaves no choice of the next bytes, it allows only the token that
the tokenizer itself would begin them with: what a model saw in training.

llguidance lets the GIL go while it compiles a grammar and while it computes a mask, but takes it again for
the tokenizer where bytes are forced (30 us each time). Times on two cores (November 2026): an ordinary schema
compiles in 1 to 10 ms, one of 2,000 properties in 0.4 s, a chain of 3,000 references in 0.2 s, 9,000 chained
terminals in Lark 15 s. Masks take 0.1 to 1 ms, at most 40. So compiling belongs into a thread of its own, the
masks into the step.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import tokenizers
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from forkpoint.configs.errors import ModelLoadError, RequestError
from forkpoint.configs.token_bytes import DecodingRules

# Some compile times grow with the square of the size, and nothing can stop a compilation that runs.
MAX_GRAMMAR_CHARACTERS = 256 * 1024
# llguidance follows references by recursion: a chain of 1,000 overflows the usual 8 MiB and ends the process.
# 512 MiB hold 20,000, more than fit in MAX_GRAMMAR_CHARACTERS. Memory is taken only as it is used.
COMPILE_STACK_BYTES = 512 * 1024 * 1024
# Compiled grammars kept for the choices of a request, and for requests that ask for the same again.
MAX_KEPT_GRAMMARS = 32
MAX_ERROR_CHARACTERS = 500


class GrammarMatcher:
    """Follows one output through its grammar. Mutable; used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, *, num_mask_words: int) -> None:
        """`matcher` is owned from now on. num_mask_words: how many int32 hold a mask."""
        self._matcher = matcher
        self.num_mask_words = num_mask_words
        # Where the grammar leaves no choice: the tokens that must come. llguidance looks at all bytes of such
        # a run for every mask: with 16,384 of them a mask took 23 ms, now 0.2 (November 2026).
        self._forced: deque[int] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether the output matches the grammar and nothing but an end-of-text token may follow it."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit t % 32 of mask[t // 32] for token t.

        mask: [num_mask_words] int32, contiguous. Raises RequestError when a limit is passed.
        """
        if not self._forced:
            fill_next_token_bitmask(self._matcher, mask[None, :])
            self._raise_error()
            if (only := _only_token(mask)) is not None:
                forced = self._matcher.compute_ff_tokens()
                self._forced.extend(forced if forced[:1] == [only] else ())
            return
        mask.fill(0)
        in_bytes = mask.view(np.uint8)  # little-endian, as llguidance writes them; a bit may be a sign
        in_bytes[self._forced[0] // 8] = 1 << self._forced[0] % 8

    def accept(self, token: int) -> None:
        """Go on past a token that the last mask allowed. Raises RequestError for any other."""
        self._matcher.consume_token(token)
        self._raise_error()
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()

    def _raise_error(self) -> None:
        # A matcher that failed allows the end of the text, and what ends there would look like an answer.
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {_first_lines(self._matcher.get_error())}")


def _only_token(mask: NDArray[np.int32]) -> int | None:
    """The one token of a mask; None if it has several or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None


class GrammarCompiler:
    """Makes matchers for one model's vocabulary. Every method may be called from any thread."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """vocab_size: rows of the model's logits; those without a token are never allowed.

        eos_token_ids: all of them are allowed where an output may end. Raises ModelLoadError.
        """
        eos = sorted(token_id for token_id in set(eos_token_ids) if 0 <= token_id < vocab_size)
        if not eos:
            raise ModelLoadError("no token ends a text, so grammars cannot be followed")
        self.eos_token_ids = frozenset(eos)
        self._num_mask_words = -(-vocab_size // 32)
        # Any: the declared type is a class of the library's, whose attributes are all that it reads.
        vocabulary: Any = _Vocabulary(backend, vocab_size, eos[0])
        # In two steps, since each holds the GIL: 0.7 and 0.85 s for 262,144 tokens, while other threads wait.
        plain = llguidance.LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=eos, slices=[])
        self._tokenizer = plain.with_slices(llguidance.LLTokenizer.general_slices())
        vocabulary.is_read_by(self._tokenizer)
        # verbose_errors would put the grammar and a trace into messages.
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos_token_ids: Collection[int]) -> GrammarCompiler:
        """Read model_dir's tokenizer. Raises ModelLoadError.

        Takes 3 to 4 s and 140 MB for 262,144 tokens, with the GIL held for up to 1.3 s at a time (December
        2026, two cores): nothing that a start should wait for, or that should run beside steps.

        eos_token_ids: of the model's configuration; the tokenizer's own is added.
        """
        path = model_dir / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        own_eos = _eos_of_settings(model_dir / "tokenizer_config.json", backend)
        return cls(backend, vocab_size=vocab_size, eos_token_ids={*eos_token_ids, *own_eos})

    def check(self, grammar: str) -> str | None:
        """Why `grammar` (llguidance's JSON text) cannot be used, for the client to read; None if it can."""
        try:
            self._compiled(grammar)
        except RequestError as error:
            return str(error)
        return None

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A new matcher, at the beginning of an output. Raises RequestError as check() tells it."""
        return GrammarMatcher(self._compiled(grammar).deep_copy(), num_mask_words=self._num_mask_words)

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        """The kept matcher of `grammar`, which nobody may move on."""
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"the grammar has {len(grammar)} characters; this server takes {MAX_GRAMMAR_CHARACTERS}"
            )
        compiled = _on_deep_stack(lambda: self._compile(grammar))
        if compiled.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_first_lines(compiled.get_error())}")
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)


class _Vocabulary:
    """What llguidance.LLTokenizer asks of a tokenizer of ours; the attributes are its names."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        backend.no_padding()
        backend.no_truncation()
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        rules = DecodingRules.from_decoder(decoder)
        self._backend = backend
        self.eos_token_id = eos_token_id
        self.tokens = [b""] * vocab_size
        for text, token_id in backend.get_vocab(with_added_tokens=True).items():
            if token_id < vocab_size:
                self.tokens[token_id] = rules.token_bytes(text)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = [i for i, token in added.items() if token.special and i < vocab_size]
        self._special = frozenset(self.special_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None

    def is_read_by(self, tokenizer: llguidance.LLTokenizer) -> None:
        """`tokenizer` has copied the tokens: let go of the list, and ask it from now on."""
        self._tokenizer = tokenizer
        self.tokens = []

    def __call__(self, text: str) -> list[int]:
        """Token ids of forced text. It must not raise: llguidance gives the whole grammar up then."""
        assert self._tokenizer is not None
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        # The tokenizer may put a space before a text, take the name of a special token for that token, or
        # know no token for a character.
        if not self._special.intersection(ids) and self._tokenizer.decode_bytes(ids) == text.encode("utf-8"):
            return ids
        return self._tokenizer.greedy_tokenize(text)


def _eos_of_settings(path: Path, backend: tokenizers.Tokenizer) -> list[int]:
    if not path.is_file():
        return []
    eos: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    token_id = backend.token_to_id(text) if isinstance(text, str) else None
    return [] if token_id is None else [token_id]


def _on_deep_stack(work: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
    """Run `work` in a thread of its own with COMPILE_STACK_BYTES of stack, and wait for it.

    Raises RequestError when it fails.
    """
    results: list[llguidance.LLMatcher] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # a panic of the library is no Exception
            failures.append(error)

    thread = threading.Thread(target=run, name="compile-grammar", daemon=True)
    # The size is a setting of the process: a thread that another one starts in between gets it too, unharmed.
    before = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if failures:
        message = _first_lines(f"{type(failures[0]).__name__}: {failures[0]}")
        raise RequestError(f"the grammar cannot be compiled: {message}") from failures[0]
    return results[0]


def _first_lines(message: str) -> str:
    """A bounded, one-line form of the library's message."""
    line = " ".join(message.split("<backtrace>")[0].split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + " ..."
