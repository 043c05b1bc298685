"""The key that a command sends to a server, from --api-key or --api-key-file."""

from __future__ import annotations

from pathlib import Path

from forkpoint.configs.errors import ConfigError


def read_api_key(api_key: str | None, api_key_file: Path | None) -> str | None:
    """The key, or None where neither is given. Raises ConfigError, which never holds the key."""
    if api_key is not None and api_key_file is not None:
        raise ConfigError("--api-key and --api-key-file both give a key", hint="give one of them")
    if api_key_file is None:
        key, flag = api_key, "--api-key"
    else:
        key, flag = _first_line(api_key_file), "--api-key-file"
    # Never in the message: whoever sees the terminal must not learn the key.
    if key is not None and (not key or not key.isprintable()):
        raise ConfigError(f"the key of {flag} is empty, or has characters that no key has")
    return key


def _first_line(path: Path) -> str:
    """The first key in a file as `serve --api-key-file` takes it: # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--api-key-file {path} cannot be read: {exc}") from exc
    return next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
