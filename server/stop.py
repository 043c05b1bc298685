"""Stop strings in streamed text: what may be sent on, what must be held back, and where to cut."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces; the split into pieces makes no difference.

    The match that starts earliest wins, as `text.index(stop)` over the whole text would say. Of two stops
    that start at the same place the shorter wins: it is complete first, and the text before it is the same.
    One search automaton per stop (Knuth, Morris, Pratt 1977): linear in text and stops together, whatever
    they repeat.

    include_stop: the emitted text ends with the stop string instead of before it.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string is refused at the door"
        self._searches = [_Search(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""  # text that was pushed but not emitted; begins at position self._held_from
        self._held_from = 0
        self._position = 0
        self._candidate: tuple[int, str] | None = None  # a complete match; an earlier one may still complete
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, known from the push() that returned it or after finish()."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; give what may be emitted now, and the stop string if the text ends here.

        Text after a match is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._searches:
            return text, None
        self._held += text
        for character in text:
            self._position += 1
            for search in self._searches:
                if search.step(character):
                    self._propose(self._position - len(search.stop), search.stop)
            if self._candidate is not None and self._candidate[0] <= self._earliest_open_start():
                return self._settle(), self._matched
        return self._emit_until(self._earliest_open_start()), None

    def finish(self) -> str:
        """The text ends: give what was held back. Look at `matched` afterwards.

        A stop may be found only here, where a longer one that began before it stayed incomplete.
        """
        if self._matched is not None:
            return ""
        if self._candidate is not None:
            return self._settle()
        return self._emit_until(self._position)

    def _propose(self, start: int, stop: str) -> None:
        if self._candidate is None or start < self._candidate[0]:
            self._candidate = (start, stop)

    def _earliest_open_start(self) -> int:
        """Where the longest unfinished match begins; a complete candidate counts as open too."""
        start = self._position - max(search.num_matched for search in self._searches)
        # After an overlapping search moved on, the candidate itself must still not be emitted.
        if self._candidate is not None and start > self._candidate[0]:
            return self._candidate[0]
        return start

    def _settle(self) -> str:
        assert self._candidate is not None
        start, self._matched = self._candidate
        return self._emit_until(start + len(self._matched) if self._include_stop else start)

    def _emit_until(self, position: int) -> str:
        count = position - self._held_from
        emitted, self._held = self._held[:count], self._held[count:]
        self._held_from = position
        return emitted


class _Search:
    """Where one stop string ends, character by character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # characters of `stop` that the text so far ends with; less than all of them
        # borders[i]: length of the longest proper prefix of stop[:i+1] that is also its suffix
        self._borders = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._borders[length - 1]
            length += stop[i] == stop[length]
            self._borders[i] = length

    def step(self, character: str) -> bool:
        """Take one character; True when the stop string ends with it."""
        length = self.num_matched
        while length and character != self.stop[length]:
            length = self._borders[length - 1]
        length += character == self.stop[length]
        is_complete = length == len(self.stop)
        self.num_matched = self._borders[length - 1] if is_complete else length
        return is_complete
