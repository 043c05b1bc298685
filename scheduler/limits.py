"""The bounds that a scheduler works within, and which requests can never fit them."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.cache import CacheGeometry, page_floor
from forkpoint.cache.pages import num_pages_for
from forkpoint.configs.errors import ConfigError, RequestError

# Decode tokens that admission keeps pages for, per running sequence; beyond them retraction helps out.
RESERVED_DECODE_TOKENS = 32
# Admission leaves room for a chunk of at least this many rows, or prefill would crawl.
MIN_CHUNK_ROOM = 256


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_rows: the token budget of one step. full_pages, swa_pages: capacities, page 0 not counted.

    chunk_grid: a chunk that is cut ends at a multiple of it where it can: of the attention tile, so that
    cold and rebuilt state are computed by the same tiles.
    """

    geometry: CacheGeometry
    context_length: int
    max_rows: int
    max_running: int
    full_pages: int
    swa_pages: int
    reserved_decode_tokens: int = RESERVED_DECODE_TOKENS
    chunk_grid: int = 1

    def __post_init__(self) -> None:
        size = self.geometry.page_size
        if self.geometry.window is not None:
            least = self.geometry.window + self.geometry.margin + 2 * size
            if self.swa_pages * size < least:
                raise ConfigError(
                    f"the SWA pool has {self.swa_pages * size} slots; window {self.geometry.window}, margin "
                    f"{self.geometry.margin} and two pages of {size} need {least}",
                    hint="give more with --swa-total-tokens, or a smaller --page-size",
                )
        if self.full_pages < 2:
            raise ConfigError(
                f"the full pool has {self.full_pages * size} slots; at least two pages of {size} are needed",
                hint="give more with --max-total-tokens, or a smaller --page-size",
            )

    def cut(self, start: int, end: int) -> int:
        """Where a chunk ends that stops short of its sequence: a grid point or page edge above start."""
        for grid in (self.chunk_grid, self.geometry.page_size):
            floor = page_floor(end, grid)
            if floor > start:
                return floor
        return end

    @property
    def resting_swa_pages(self) -> int:
        """Most SWA pages that one sequence holds between steps."""
        return num_pages_for(self.geometry.max_resting_swa_tokens(), self.geometry.page_size)

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Raises RequestError when a request could never run, even alone."""
        size = self.geometry.page_size
        slots = self.full_pages * size
        if prompt_len + min(1, max_tokens) > self.context_length:
            raise RequestError(
                f"prompt has {prompt_len} tokens; the context is {self.context_length} (--context-length)",
                code="context_length_exceeded",
                param="prompt",
            )
        if (num_pages_for(prompt_len, size) + 1) * size > slots:
            raise RequestError(
                f"prompt has {prompt_len} tokens; the KV pool holds {slots}, one page of {size} to spare "
                "(--max-total-tokens)",
                code="context_length_exceeded",
                param="prompt",
            )
        if num_pages_for(min(prompt_len + max_tokens, self.context_length) - 1, size) * size > slots:
            raise RequestError(
                f"prompt of {prompt_len} and max_tokens {max_tokens} need {prompt_len + max_tokens} slots; "
                f"the KV pool holds {slots} (--max-total-tokens)",
                code="context_length_exceeded",
                param="max_tokens",
            )
