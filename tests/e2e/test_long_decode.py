"""A sequence that decodes 2,000 tokens holds one window, and gives everything back."""

from __future__ import annotations

import threading

from support.served import ServedModel, pool_of
from support.tiny_models import WINDOW

PAGE_SIZE = 4
MARGIN = 16
SWA_SLOTS = 1024
PROMPT_LEN = 100
NUM_TOKENS = 2000
MOST_RESTING_SLOTS = WINDOW + MARGIN + 2 * (PAGE_SIZE - 1)


def test_long_decode_holds_one_window_and_gives_all_pages_back(fragments: ServedModel) -> None:
    """Leased + locked is exact in vllm:kv_cache_usage_perc, since the SWA pool is the fuller one here.

    A leak of one page per window would be 62 pages, 248 slots, at the end: four times the bound.
    """
    fragments.flush()
    answers = []

    def generate() -> None:
        prompt = [3 + index % 300 for index in range(PROMPT_LEN)]
        answers.append(fragments.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True))

    held, in_tree = [], []
    generation = threading.Thread(target=generate)
    generation.start()
    while generation.is_alive():
        metrics = fragments.metrics()
        usage = next(value for name, value in metrics.items() if name.startswith("vllm:kv_cache_usage_perc"))
        pool = pool_of(metrics, "swa")
        assert sum(pool.values()) == SWA_SLOTS
        # The prompt of 100 tokens and its first tokens are one step, so it is never sampled in between.
        held.append(usage * SWA_SLOTS)
        in_tree.append(pool["tree"])
    generation.join()
    assert answers[0]["usage"]["completion_tokens"] == NUM_TOKENS
    assert len(held) > 100
    assert WINDOW - 1 <= max(held) <= MOST_RESTING_SLOTS + 1e-6
    # The tree has the prompt's window and scraps; at the end, which the last samples may see, a window more.
    assert max(in_tree) <= PROMPT_LEN + MOST_RESTING_SLOTS
    fragments.flush()
    assert fragments.pool("swa")["free"] == SWA_SLOTS
    assert fragments.pool("full")["free"] == 100_000
