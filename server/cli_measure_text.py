"""A text of any length to measure with, where the user gives none: our own sentences in a fixed shuffle."""

from __future__ import annotations

import random
from collections.abc import Iterator

from forkpoint.server.text import Tokenizer

_SUBJECTS = (
    "The harbour office", "An old surveyor", "The night train", "Her younger brother", "The museum of clocks",
    "A gardener from the valley", "The second expedition", "The town council", "A printer's apprentice",
    "The weather station", "The owner of the mill", "A letter without a sender", "The choir",
    "The last ferry of the day", "A committee of three", "The new bridge",
)  # fmt: skip
_EVENTS = (
    "kept a careful record of the tides", "changed its plans without telling anybody",
    "was known for answering slowly and correctly", "had been repaired twice in the same winter",
    "counted the boxes again and found one too many", "never spoke about the year of the flood",
    "sold the spare parts at the market on Thursday", "waited until the fog had gone",
    "measured the field with a rope of forty metres", "opened half an hour later than the sign said",
    "wrote the names on the back of an envelope", "lost the argument but not the bet",
)  # fmt: skip
_TURNS = (
    "which surprised only those who had come from outside", "because the road along the river was closed",
    "although nobody had asked for it", "and that was the reason why the price went up in autumn",
    "as the rules had required since the days of the first mayor", "so the lamps stayed lit until morning",
    "while the others were still looking for the key", "and the neighbours talked about it for weeks",
    "since a smaller number would have been hard to explain", "just as the manual describes it on page nine",
)  # fmt: skip
_ENDINGS = (
    "Nothing else is written about it.", "Later reports say the opposite.",
    "The drawing shows it from the side.",
    "Whoever wants to know more must ask in the archive.", "In the end it made little difference.",
    "There is a photograph, but the date on it is wrong.", "It took three attempts.",
)  # fmt: skip


def sample_paragraphs() -> Iterator[str]:
    """Numbered paragraphs without end, always the same ones; none repeats another."""
    rng = random.Random(270)
    number = 0
    while True:
        number += 1
        sentences = [
            f"{rng.choice(_SUBJECTS)} {rng.choice(_EVENTS)}, {rng.choice(_TURNS)}."
            for _ in range(rng.randint(3, 6))
        ]
        yield f"{number}. {' '.join(sentences)} {rng.choice(_ENDINGS)}\n"


def sample_token_ids(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """The first num_tokens of the text, as this model's tokens."""
    num_characters = 8 * num_tokens
    while len(ids := tokenizer.encode(sample_text(num_characters))) < num_tokens:
        num_characters *= 2
    return [int(token) for token in ids[:num_tokens]]


def sample_text(num_characters: int) -> str:
    """The first paragraphs, of num_characters in all or a little more."""
    parts: list[str] = []
    length = 0
    for paragraph in sample_paragraphs():
        if length >= num_characters:
            break
        parts.append(paragraph)
        length += len(paragraph)
    return "".join(parts)
