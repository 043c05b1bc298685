"""The grammar of one sequence while it runs: compiled beside the steps, then moved on with each token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray

from forkpoint.configs.errors import ModelLoadError, RequestError

if TYPE_CHECKING:
    # The scheduler also runs where neither llguidance nor tokenizers is wanted: in a simulation.
    from forkpoint.scheduler.grammar import GrammarCompiler, GrammarMatcher

log = structlog.get_logger("forkpoint.engine")


class Constraint:
    """Which tokens may come next in one sequence. Mutable: advance() moves it; retraction leaves it alone."""

    def __init__(self, matcher: GrammarMatcher, eos_token_ids: Collection[int]) -> None:
        """`matcher` is owned from now on. Raises RequestError if it cannot tell the first tokens."""
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._mask = np.zeros(matcher.num_mask_words, dtype=np.int32)
        matcher.fill_mask(self._mask)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_complete

    def ends_with(self, token: int) -> bool:
        """Whether `token` ends a text by itself."""
        return token in self._eos_token_ids

    def mask(self, *, may_end: bool) -> NDArray[np.int32]:
        """[ceil(V / 32)] which tokens may come next, as Draw.mask; without the ends of a text unless may_end.

        Valid until the next advance().
        """
        if may_end:
            return self._mask
        mask = self._mask.copy()
        # Bytes, as a bit of an int32 may be its sign; llguidance writes its masks in little-endian order.
        in_bytes = mask.view(np.uint8)
        for token in self._eos_token_ids:
            in_bytes[token // 8] &= 0xFF ^ (1 << token % 8)
        return mask

    def advance(self, token: int) -> None:
        """Go on past a token that the mask allowed. Raises RequestError when a limit is passed."""
        self._matcher.accept(token)
        if not self.is_complete:
            self._matcher.fill_mask(self._mask)


class Compilations:
    """Compiles grammars in a thread of its own, so that no step waits for one.

    The compiler is loaded there too, at prepare() or with the first grammar: no start waits for it.
    """

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        """load: called once, in the thread. Where it raises ModelLoadError, every grammar is refused."""
        self._load = load
        self._compiler: Future[GrammarCompiler] | None = None
        # One thread: more would take the cores from the steps, and what is asked for first is done first.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    def prepare(self) -> Future[GrammarCompiler]:
        """Begin to load the compiler, unless that was done. Returns at once.

        Holds the GIL for about a second at a time (GrammarCompiler.load): for a moment without work.
        """
        if self._compiler is None:
            self._compiler = self._threads.submit(self._load_compiler)
        return self._compiler

    def start(self, grammar: str) -> Future[Constraint]:
        """A new constraint, at the beginning of an output; the future raises RequestError."""
        return self._threads.submit(_compile, self.prepare(), grammar)

    def _load_compiler(self) -> GrammarCompiler:
        try:
            return self._load()
        except ModelLoadError as error:
            log.warning("grammars_unavailable", reason=str(error))
            raise


def _compile(loaded: Future[GrammarCompiler], grammar: str) -> Constraint:
    try:
        compiler = loaded.result()  # the same thread has loaded it before
    except ModelLoadError as error:
        raise RequestError(f"this model cannot follow grammars: {error}") from error
    return Constraint(compiler.matcher(grammar), compiler.eos_token_ids)
