"""How much of a prefill runs in one step, and what it takes over from its neighbours between chunks."""

from __future__ import annotations

from forkpoint.cache import PrefixCache
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.plan import PlanDraft, Span
from forkpoint.scheduler.roster import Roster
from forkpoint.scheduler.sequence import Sequence
from forkpoint.scheduler.work import WorkMeter

# A prefill takes chunks of no more rows than this where larger ones would cost a kept window.
SHRUNK_CHUNK = 1024


class Chunks:
    """Plans the chunks of prefills. Holds no state of its own."""

    def __init__(self, roster: Roster, cache: PrefixCache, limits: SchedulerLimits, work: WorkMeter) -> None:
        self._roster = roster
        self._cache = cache
        self._limits = limits
        self._work = work

    def plan(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Plan as many rows of a prefill as budget and pools allow; False when that is none."""
        lease = sequence.lease
        assert lease is not None
        start = sequence.num_computed
        # Early rows of a rebuild run in few layers and cost little, but each takes a slot all the same.
        budget = self._limits.max_rows - draft.rows
        end = min(sequence.num_tokens, start + budget, self._cache.max_end(lease))
        # Rather several smaller chunks than a kept window lost.
        end = max(min(end, start + SHRUNK_CHUNK), min(end, self._cache.max_end_without_eviction(lease)))
        if end < sequence.num_tokens:
            end = self._limits.cut(start, end)
        if end <= start:
            return False
        self._cache.extend(lease, end)
        span = Span(sequence, start, end, is_decode=False)
        draft.add_chunk(span, self._work.rows(span))
        return True

    def jump_ahead(self, sequence: Sequence) -> None:
        """Take over what a neighbour has computed of this prefill meanwhile, where that is less work."""
        lease = sequence.lease
        assert lease is not None
        if not self._cache.enabled or sequence.num_computed < lease.full_hit:
            return
        match = self._cache.match(sequence.reusable_tokens, sequence.namespace)
        start, full_hit = sequence.num_computed, match.full_len
        gained = full_hit - start
        if gained <= 0 or self._work.row_layers_below(match) >= self._work.row_layers_of(gained):
            return
        # Borrowed before the old lease goes, or the window at `start` might go with it.
        self._roster.acquire(sequence, match)
        self._cache.release(lease, sequence.tokens, start, keeps_end=False)
        assert sequence.lease is not None
        # Of the prompt, and only what was never computed: repeated work is counted apart.
        first = max(start, sequence.most_computed)
        reached, last = sequence.lease.start, min(full_hit, sequence.prompt_len)
        rebuilt = 0 if self._cache.staircase is None else max(0, last - max(reached, first))
        self._roster.account(sequence, cached=max(0, min(reached, last) - first), rebuilt=rebuilt)
