"""How a family's calls are written out, for grammars that force them and for histories shown as text."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Text around the arguments, which are JSON. before, after: of all calls. between: two of them.

    opening: before the name; head: from the name to the arguments; closing: after them.
    has_quoted_name: the name is a JSON string. is_single: the family's template knows one call in a message.
    """

    before: str = ""
    opening: str = '{"name": '
    head: str = ', "arguments": '
    closing: str = "}"
    between: str = "\n"
    after: str = ""
    has_quoted_name: bool = True
    is_single: bool = False

    def start_of(self, name: str) -> str:
        """All of one call that comes before its arguments."""
        written = json.dumps(name, ensure_ascii=False) if self.has_quoted_name else name
        return self.opening + written + self.head
