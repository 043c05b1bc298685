"""Which rows each layer must run to rebuild lost SWA windows exactly below a full hit.

The full KV of [0, F) is cached; SWA state is live below the resume point R and gone on [R, F). Wanted: SWA
keys and values on the last W - 1 positions before F, in every SWA layer. A SWA layer at position p depends
on the layer's input at (p - W, p], so going down each SWA layer widens the range by W - 1; a full layer adds
nothing, since its keys come from the cache:

    a[n] = F
    a[l] = max(R, min(a[l+1] - (W - 1), page_floor(F - (W - 1))))     SWA layer
    a[l] = a[l+1]                                                     full layer

    layer l computes K and V on [a[l], F), attention and MLP on [a[l+1], F)

                      R                  a[0]    a[1]   a[2]  ...  a[n] = F
    layer 0           .                   [====================)
    layer 1           .                           [============)
    layer 2           .                                  [=====)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Staircase:
    """The geometry of a model's rebuilds.

    pattern: one letter per layer, S or F. window: W, counting the query. tile: attention tile of the
    backend; a[l] is rounded down to its multiples (never below R), so that a rebuild computes the same
    tiles as a cold run and its result is equal bit for bit. depth: rebuild only as if the model had this
    many SWA layers; not exact. None: exact.
    """

    pattern: str
    window: int
    page_size: int
    tile: int = 1
    depth: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    def live_from(self, full_hit: int, resume: int) -> int:
        """The lowest position that is right in every layer after the rebuild; a multiple of the page."""
        wanted = max(0, full_hit - (self.window - 1))
        return max(resume, wanted - wanted % self.page_size)

    def first_rows(self, full_hit: int, resume: int) -> tuple[int, ...]:
        """a[0] .. a[n], ascending; a[0] is where the rebuild starts. All equal F when nothing is lost."""
        return _first_rows(self, full_hit, resume)

    def start(self, full_hit: int, resume: int) -> int:
        """a[0]: the first position to run."""
        return self.first_rows(full_hit, resume)[0]

    def row_layers(self, full_hit: int, resume: int, start: int, end: int) -> int:
        """Attention and MLP rows over all layers that positions start..end cost."""
        above = self.first_rows(full_hit, resume)[1:]
        return sum(max(0, end - max(start, first)) for first in above)


@lru_cache(maxsize=1024)
def _first_rows(stairs: Staircase, full_hit: int, resume: int) -> tuple[int, ...]:
    if full_hit <= resume:
        return (full_hit,) * (stairs.num_layers + 1)
    target = stairs.live_from(full_hit, resume)
    lowest = resume
    if stairs.depth is not None:
        lowest = max(resume, target - (stairs.window - 1) * (stairs.depth - 1))
    rows = [full_hit]
    for kind in reversed(stairs.pattern):
        first = rows[-1]
        if kind == "S":
            first = min(first - (stairs.window - 1), target)
            first = max(lowest, first - first % stairs.tile)
        rows.append(first)
    return tuple(reversed(rows))
