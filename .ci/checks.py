"""The static checks, all of them even if one fails: ruff, mypy and the import rules."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PARTS = ("server", "model", "cache", "scheduler", "configs")
LINKS = Path(".links", "forkpoint")


def main() -> int:
    """Run every check from the root of the repository; returns 1 if any of them found something."""
    make_links(ROOT)
    checks = {
        "ruff check": ["ruff", "check", "--output-format", "concise"],
        "ruff format": ["ruff", "format", "--check"],
        # One run for all: reading what is known of torch takes longer than checking ours.
        "mypy": ["mypy", str(LINKS), "tests", ".ci", "benchmarks"],
        "import rules": ["lint-imports"],
    }
    failed = [name for name, command in checks.items() if not _passes(name, command)]
    print(f"check: {', '.join(failed)} failed" if failed else "check: all clean")
    return 1 if failed else 0


def make_links(root: Path) -> None:
    """Make .links/forkpoint/<part> -> <part>.

    The editable install maps folders to packages by an import hook, which mypy cannot see.
    """
    links = root / LINKS
    links.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        link = links / part
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", part))


def _passes(name: str, command: list[str]) -> bool:
    start = time.monotonic()
    program, *arguments = command
    status = subprocess.run([str(BIN / program), *arguments], cwd=ROOT, check=False).returncode
    print(
        f"check: {name}: {'ok' if status == 0 else 'FAILED'} ({time.monotonic() - start:.1f} s)", flush=True
    )
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
