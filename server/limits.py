"""What fits: prompt and answer lengths against the context and against the pools of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.configs.errors import RequestError
from forkpoint.scheduler.messages import EngineInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one engine. Lengths are in tokens; pools hold whole pages.

    One rule for both APIs: an explicit max_tokens is cut to the room left in the context (the answer then
    ends with reason `length`); what the context allows but the pools never could is refused at once.
    """

    info: EngineInfo

    def check_num_characters(self, num_characters: int, max_token_characters: int) -> None:
        """Refuse a text that is too long whatever its tokens are; costs nothing, before tokenising."""
        least_tokens = -(-num_characters // max_token_characters)
        if least_tokens >= self.info.context_length:
            raise self._context_error(f"at least {least_tokens}")

    def check_prompt(self, num_tokens: int) -> None:
        """Raise RequestError unless the prompt and one page of answer fit in the context and the pools."""
        info = self.info
        if num_tokens >= info.context_length:
            raise self._context_error(str(num_tokens))
        need = page_ceil(num_tokens, info.page_size) + info.page_size
        if 0 < info.full_tokens < need:
            raise _pool_error(f"a prompt of {num_tokens} tokens", need, info.full_tokens, "full-attention")
        if info.window is not None and info.swa_tokens > 0:
            # A running sequence holds its window, the margin and two partly used pages; a short one less.
            need_swa = min(need, page_ceil(info.window + info.margin, info.page_size) + 2 * info.page_size)
            if info.swa_tokens < need_swa:
                raise _pool_error(
                    f"a prompt of {num_tokens} tokens", need_swa, info.swa_tokens, "sliding-window"
                )

    def max_tokens(self, num_prompt_tokens: int, asked: int | None, *, default: int | None) -> int:
        """How many tokens may be generated after a prompt that passed check_prompt.

        default: for a request that names no number; None means all the room there is.
        Raises RequestError if `asked`, cut to the context, can never fit in the full-attention pool.
        """
        info = self.info
        context_room = info.context_length - num_prompt_tokens
        pool_room = context_room
        if info.full_tokens > 0:
            pool_room = info.full_tokens // info.page_size * info.page_size - num_prompt_tokens
        if asked is None:
            return min(context_room, pool_room, context_room if default is None else default)
        wanted = min(asked, context_room)
        if wanted > pool_room:
            need = page_ceil(num_prompt_tokens + wanted, info.page_size)
            what = f"a prompt of {num_prompt_tokens} tokens with max_tokens {wanted}"
            raise _pool_error(what, need, info.full_tokens, "full-attention", param="max_tokens")
        return wanted

    def _context_error(self, num_tokens: str) -> RequestError:
        return RequestError(
            f"the prompt has {num_tokens} tokens; the context of this model holds "
            f"{self.info.context_length}, of which at least 1 is for the answer (--context-length)",
            code="context_length_exceeded",
        )


def page_ceil(num_tokens: int, page_size: int) -> int:
    """num_tokens, rounded up to whole pages."""
    return -(-num_tokens // page_size) * page_size


def _pool_error(what: str, need: int, capacity: int, pool: str, param: str | None = None) -> RequestError:
    flag = "--max-total-tokens" if pool == "full-attention" else "--swa-total-tokens"
    return RequestError(
        f"{what} needs {need} slots of the {pool} pool, which has {capacity} ({flag})",
        param=param,
        code="context_length_exceeded",
    )
