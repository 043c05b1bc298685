"""Texts of a wanted number of tokens: random words, and a head that no other text of the run begins with.

Words cost tokens as the model's own tokenizer says; a text is counted as a whole in the end and mended until
its count is right. So lengths are exact with any tokenizer that somebody can ask.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WORDS = tuple(
    """
    able above account across actor adult advice after afternoon again age agree air album alive allow
    almost along amount angle animal answer apple april area argue arm army around arrive article ask
    attack autumn average avoid baby back balance ball bank base basket beach bear beautiful because bed
    before begin behind believe bell below best better between bicycle big bird bitter black blood blue
    board boat body bone book border bottle bottom box boy brain branch bread break breakfast bridge
    bright bring broad brother brown brush build burn bus business butter button buy cake call camera
    candle captain car card care carry castle cat catch cause centre certain chain chair chance change
    cheap cheese chicken child choice church circle city clean clear climate clock close cloth cloud
    club coal coast coat coffee cold collect colour come common company complete cook copper copy corner
    cost cotton count country course cover cow cream crime cross crowd cry cup curtain cut dance danger
    dark daughter day dead deal dear decide deep degree delicate desert design desk detail develop die
    dinner direction dirty discover distance doctor dog dollar door doubt down draw dream dress drink
    drive drop dry dust ear early earth east easy edge education egg eight empty end energy engine enjoy
    enough enter equal error even evening event ever every example exchange expect expert eye face fact
    factory fair fall family famous far farm fast father fear feather feel female fence few field fight
    figure fill film final find fine finger finish fire first fish five flag flame flat flight floor
    flower fly fold food foot force foreign forest forget fork form forward four frame free fresh friend
    front fruit full future garden gas general gentle gift girl give glass glove goat gold good govern
    grain grass great green grey ground group grow guess guide gun hair half hall hammer hand happy
    harbour hard hat head health hear heart heat heavy help high hill history hold hole hollow holiday
    home honey hook hope horn horse hospital hotel hour house humour hundred hurry ice idea important
    inch industry ink insect inside interest invent iron island jewel join journey judge juice jump keep
    kettle key kick kind king kitchen knee knife knot know
    """.split()  # noqa: SIM905 (a list of them would fill pages)
)
# Pieces that most tokenizers give one token each, to fill what no word fits.
_FILLERS = (" a", " I", ".", ",", ";", "!", "?", ":")
# Words are counted behind this one: the first of a text may cost more or less.
_BEFORE = "It"
_MAX_MENDS = 40
# After so many words that did not fit, fillers are tried too.
_MENDS_BY_WORDS = 8


class TokenCount(Protocol):
    """Says how many tokens a text has."""

    async def __call__(self, text: str, *, is_whole_prompt: bool) -> int:
        """is_whole_prompt: count the special tokens that the server puts around a prompt too."""
        ...


class TextSource(Protocol):
    """Makes texts of wanted lengths. is_exact: the lengths are right, not about right."""

    @property
    def is_exact(self) -> bool: ...

    async def extend(
        self, base: str, num_tokens: int, rng: random.Random, *, is_whole_prompt: bool = False
    ) -> str:
        """What to write behind `base`, so that both together have num_tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    cost: int


class CountedTexts:
    """Texts whose tokens are counted one by one. Mutable: remembers whether a length could not be met."""

    def __init__(self, count: TokenCount, pieces: Sequence[tuple[str, int]]) -> None:
        """pieces: words and fillers with the tokens that each costs (measure_pieces)."""
        self._count = count
        self._pieces = [_Piece(text, cost) for text, cost in pieces if cost > 0]
        self._words = [piece for piece in self._pieces if piece.text not in _FILLERS]
        self._fillers = [piece for piece in self._pieces if piece.text in _FILLERS]
        self._is_exact = True

    @property
    def is_exact(self) -> bool:
        return self._is_exact

    async def extend(
        self, base: str, num_tokens: int, rng: random.Random, *, is_whole_prompt: bool = False
    ) -> str:
        async def missing(pieces: list[_Piece]) -> int:
            text = base + "".join(piece.text for piece in pieces)
            return num_tokens - await self._count(text, is_whole_prompt=is_whole_prompt)

        # The head's cost is not known: 0 keeps it in place, and counting the whole text finds it.
        head = [_Piece(f" {rng.getrandbits(32):08x}" if base else f"{rng.getrandbits(32):08x}", 0)]
        if await missing(head) < 0:  # too short a text for a head
            head = []
        pieces = list(head)
        for attempt in range(_MAX_MENDS):
            shortage = await missing(pieces)
            if shortage == 0:
                return "".join(piece.text for piece in pieces)
            if shortage > 0:
                pieces += self._worth(shortage, rng, by_words=attempt < _MENDS_BY_WORDS)
            while shortage < 0 and len(pieces) > len(head):
                shortage += pieces.pop().cost
            if len(pieces) == len(head) and shortage < 0:
                break
        self._is_exact = False
        return "".join(piece.text for piece in pieces)

    def _worth(self, num_tokens: int, rng: random.Random, *, by_words: bool) -> list[_Piece]:
        """Random pieces that cost num_tokens together, as far as there are such; words wherever they fit."""
        chosen: list[_Piece] = []
        dearest = max(piece.cost for piece in self._pieces)
        while num_tokens > 0:
            fitting = self._words
            if num_tokens < dearest:
                preferred = self._words if by_words else self._fillers
                fitting = [piece for piece in preferred if piece.cost <= num_tokens]
                fitting = fitting or [piece for piece in self._pieces if piece.cost <= num_tokens]
            if not fitting:
                break
            chosen.append(rng.choice(fitting))
            num_tokens -= chosen[-1].cost
        return chosen


class ScaledTexts:
    """Texts of about the wanted length, where nobody counts: so many tokens per word, as a probe told."""

    is_exact = False

    def __init__(self, tokens_per_word: float, tokens_around: float) -> None:
        """tokens_around: what the server puts around a prompt (special tokens, a chat template)."""
        self._tokens_per_word = tokens_per_word
        self._tokens_around = tokens_around

    async def extend(
        self, base: str, num_tokens: int, rng: random.Random, *, is_whole_prompt: bool = False
    ) -> str:
        num_words = num_tokens / self._tokens_per_word - len(base.split())
        if is_whole_prompt:
            num_words -= self._tokens_around / self._tokens_per_word
        text = random_words(max(round(num_words), 1), rng)
        return f" {text}" if base else text


def text_rng(seed: int, *place: object) -> random.Random:
    """The randomness of one text. Hashed, so that seeds and places which are near have nothing in common."""
    label = "/".join(str(part) for part in (seed, *place))
    return random.Random(hashlib.sha256(label.encode()).hexdigest())


def random_words(num_words: int, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


async def measure_pieces(count: TokenCount) -> list[tuple[str, int]]:
    """What each word and filler costs behind other words."""
    around = await count(_BEFORE, is_whole_prompt=False)
    texts = [f" {word}" for word in WORDS] + list(_FILLERS)
    return [(text, await count(_BEFORE + text, is_whole_prompt=False) - around) for text in texts]
