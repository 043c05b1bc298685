"""Page size, window and margin of a cache, and the position arithmetic that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.cache.pages import num_pages_for, page_floor

MIN_MARGIN = 16


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """page_size: P >= 1. window: W, counting the query itself, or None for a model without SWA layers."""

    page_size: int
    window: int | None

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; it must be 1 or more")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be 1 or more")

    @property
    def margin(self) -> int:
        """Positions kept below every window, so that a follow-up which drops a few tokens still fits.

        At least P - 1, or the page edge below the last computed position would not be a legal length.
        """
        return max(MIN_MARGIN, self.page_size - 1)

    @property
    def pages_to_resume(self) -> int:
        """SWA pages that must be live below a page edge for it to be legal: ceil((W - 1) / P)."""
        assert self.window is not None
        return num_pages_for(self.window - 1, self.page_size)

    def frontier(self, num_computed: int) -> int:
        """The lowest position whose SWA state is kept once num_computed positions are computed."""
        assert self.window is not None
        lowest = num_computed - (self.window - 1) - self.margin
        return page_floor(lowest, self.page_size) if lowest > 0 else 0

    def max_resting_swa_tokens(self) -> int:
        """Most SWA slots that one sequence holds between steps: W + margin + 2 (P - 1)."""
        return 0 if self.window is None else self.window + self.margin + 2 * (self.page_size - 1)
