"""Which SWA windows are kept for later requests: small pure classes chosen by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forkpoint.cache.geometry import CacheGeometry
from forkpoint.cache.lease import Lease
from forkpoint.cache.tree import WindowClass


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep a window that ends at position `end`."""

    end: int
    window_class: WindowClass


class RetentionPolicy(Protocol):
    """Says after each commit at which positions a window stays, beside the running one."""

    @property
    def keeps_branch_points(self) -> bool:
        """Whether a window stays where a request leaves a prefix whose window was gone, or resumed from."""
        ...

    def keeps(self, lease: Lease, previously: int, num_computed: int, geometry: CacheGeometry) -> list[Keep]:
        """Windows that end in (previously, num_computed], in ascending order."""
        ...


class TailRetention:
    """Only the end of the prompt: what a follow-up of the same conversation resumes from."""

    keeps_branch_points = False

    def keeps(self, lease: Lease, previously: int, num_computed: int, geometry: CacheGeometry) -> list[Keep]:
        return _within([Keep(lease.prompt_len, "prompt_tail")], previously, num_computed)


class BranchRetention:
    """The end of the prompt, and the branch point: where this request's full hit ended beyond its window.

    The second request of a shared prompt finds the branch point and keeps the window there, so the third
    has no gap.
    """

    keeps_branch_points = True

    def keeps(self, lease: Lease, previously: int, num_computed: int, geometry: CacheGeometry) -> list[Keep]:
        return _within([*_branch(lease), Keep(lease.prompt_len, "prompt_tail")], previously, num_computed)


class AnchorRetention:
    """As BranchRetention, and the places that are likely forks by the shape of the prompt.

    The first anchor ends the system prompt and always stays. A later one stays if it lies a window or more
    past the last kept end, for a nearer one is cheap to rebuild, and not under the margin of the tail.
    """

    keeps_branch_points = True

    def keeps(self, lease: Lease, previously: int, num_computed: int, geometry: CacheGeometry) -> list[Keep]:
        assert geometry.window is not None
        found = [*_branch(lease)]
        last_kept = lease.resume if lease.branch_point is None else lease.branch_point
        for index, anchor in enumerate(lease.anchors):
            if anchor <= lease.start or anchor + geometry.margin >= lease.prompt_len:
                continue
            if index == 0 or anchor >= last_kept + geometry.window:
                found.append(Keep(anchor, "system_anchor" if index == 0 else "message_anchor"))
                last_kept = max(last_kept, anchor)
        found.append(Keep(lease.prompt_len, "prompt_tail"))
        return _within(found, previously, num_computed)


def _branch(lease: Lease) -> list[Keep]:
    return [] if lease.branch_point is None else [Keep(lease.branch_point, "branch")]


def _within(keeps: list[Keep], previously: int, num_computed: int) -> list[Keep]:
    return [keep for keep in keeps if previously < keep.end <= num_computed]


RETENTION_POLICIES: dict[str, RetentionPolicy] = {
    "anchors": AnchorRetention(),
    "branch": BranchRetention(),
    "tail": TailRetention(),
}
