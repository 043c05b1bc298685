"""What `./dev` runs: makes .venv complete if it is not, then becomes the command that was asked for.

Standard library only, because it runs before anything is installed, and Python 3.10, because that is the
oldest one that Forkpoint supports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(
    0, str(ROOT / ".ci")
)  # Python runs isolated (-I), so this folder is not on the path by itself

from environment import Environment, SetupError, gpu_is_present  # noqa: E402

USAGE = """\
usage: ./dev COMMAND [ARGS]

  serve [ARGS]   serve the demo model, or what `forkpoint serve ARGS` names, on http://127.0.0.1:8000
  test [ARGS]    run every test that needs no GPU; ARGS go to pytest
  check          ruff, mypy, import rules: what must be clean before a commit
  fuzz [ARGS]    drive scheduler and cache with random work under the checking runner, until it fails or ends
  help           show this

The first use makes .venv and installs into it; later uses only start. pip's own settings are respected.
FORKPOINT_DEV_DEVICE=cpu or gpu overrides what ./dev sees of the machine.
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status where it did not become another program."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    if command in ("help", "--help", "-h"):
        print(USAGE, end="")
        return 0
    if command not in COMMANDS:
        print(f"dev: there is no command {command!r}\n", file=sys.stderr)
        print(USAGE, end="", file=sys.stderr)
        return 2
    # An installation that is told to end must take pip with it. Becoming another program resets this.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        COMMANDS[command](rest)
    except SetupError as error:
        print(f"dev: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndev: interrupted; the next start repairs what was left half installed", file=sys.stderr)
        return 130


def serve(arguments: Sequence[str]) -> NoReturn:
    """Become `forkpoint serve`. The working directory stays: MODEL may be a relative path."""
    environment = _ready_environment({"demo"})
    _become(environment, "forkpoint", "serve", *arguments)


def test(arguments: Sequence[str]) -> NoReturn:
    """Become pytest, at the root of the repository."""
    environment = _ready_environment({"demo", "test"})
    os.chdir(ROOT)
    _become(environment, "pytest", *arguments)


def check(arguments: Sequence[str]) -> NoReturn:
    """Become the static checks, at the root of the repository."""
    environment = _ready_environment({"demo", "test"})
    os.chdir(ROOT)
    _become(environment, "python", str(ROOT / ".ci" / "checks.py"), *arguments)


def fuzz(arguments: Sequence[str]) -> NoReturn:
    """Become the random driver of scheduler and cache."""
    environment = _ready_environment({"demo", "test"})
    os.chdir(ROOT)
    _become(environment, "python", str(ROOT / "tests" / "fuzz.py"), *arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], NoReturn]] = {
    "serve": serve,
    "test": test,
    "check": check,
    "fuzz": fuzz,
}


def _ready_environment(extras: set[str]) -> Environment:
    device = os.environ.get("FORKPOINT_DEV_DEVICE", "auto")
    if device not in ("auto", "cpu", "gpu"):
        raise SetupError(f"FORKPOINT_DEV_DEVICE is {device!r}; it must be auto, cpu or gpu")
    with_gpu = device == "gpu" or (device == "auto" and gpu_is_present())
    environment = Environment(ROOT, with_gpu=with_gpu)
    environment.ensure(extras | {"gpu"} if with_gpu else extras)
    return environment


def _become(environment: Environment, program: str, *arguments: str) -> NoReturn:
    # exec, not a child: Ctrl-C and SIGTERM must reach the server itself.
    sys.stdout.flush()
    path = str(environment.bin / program)
    os.execv(path, [path, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
