"""Which SWA windows are kept for later requests: small pure classes chosen by name."""

from __future__ import annotations

from typing import Protocol

from forkpoint.cache.lease import Lease


class RetentionPolicy(Protocol):
    """Says after each commit at which positions a window stays, beside the running one."""

    def keeps_branch_points(self) -> bool:
        """Whether a window stays where a request leaves a prefix whose window was gone, or resumed from."""
        ...

    def ends(self, lease: Lease, previously: int, num_computed: int) -> list[int]:
        """Positions in (previously, num_computed] at which to keep a window, in ascending order."""
        ...


class BranchRetention:
    """The end of the prompt, and the branch point: where this request's full hit ended beyond its window.

    The second request of a shared prompt finds the branch point and keeps the window there, so the third
    has no gap.
    """

    def keeps_branch_points(self) -> bool:
        return True

    def ends(self, lease: Lease, previously: int, num_computed: int) -> list[int]:
        ends = [lease.prompt_len] if lease.branch_point is None else [lease.branch_point, lease.prompt_len]
        return [end for end in ends if previously < end <= num_computed]


class TailRetention:
    """Only the end of the prompt: what a follow-up of the same conversation resumes from."""

    def keeps_branch_points(self) -> bool:
        return False

    def ends(self, lease: Lease, previously: int, num_computed: int) -> list[int]:
        return [lease.prompt_len] if previously < lease.prompt_len <= num_computed else []


RETENTION_POLICIES: dict[str, RetentionPolicy] = {"branch": BranchRetention(), "tail": TailRetention()}
