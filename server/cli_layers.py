"""Where a setting comes from: command line, else FORKPOINT_* environment, else --config files, else default.

Each layer fills only what the layers before it left open. They are cyclopts config layers: called in order,
each adds tokens to the arguments that have none.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from cyclopts import App, ArgumentCollection, Token
from cyclopts.config import Env

from forkpoint.configs.chat_settings import ChatSettings
from forkpoint.configs.errors import ConfigError

ENVIRONMENT_PREFIX = "FORKPOINT_"
CONFIG_FLAG = "--config"
CACHE_VARIABLE = "FORKPOINT_CACHE"
# Read by `serve`, by ./dev and by `chat`. Everything else with our prefix should be a setting.
OTHER_VARIABLES = frozenset(
    {CACHE_VARIABLE, "FORKPOINT_DEV_DEVICE"}
    | {ENVIRONMENT_PREFIX + field.name.upper() for field in dataclasses.fields(ChatSettings)}
)

# Of a service link: an address in FORKPOINT_PORT, and names beside it (FORKPOINT_PORT_8000_TCP_ADDR).
_LINK = re.compile(r"(tcp|udp|sctp)://")
_LINK_NAME = re.compile(r"FORKPOINT_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


class Layers:
    """The layers of one invocation, and what they found out.

    origins: filled while arguments are read; flag (`--page-size`) to a text for people (`environment
    FORKPOINT_PAGE_SIZE`). A flag that is absent has its default.
    """

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}

    @property
    def in_order(self) -> tuple[Any, ...]:
        """What cyclopts calls, best first."""
        return (
            Env(ENVIRONMENT_PREFIX, command=False, show=False, source="environment"),
            _drop_service_links,
            self._read_files,
            _refuse_fractions,
            self._record,
        )

    def _read_files(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        files = arguments.get(CONFIG_FLAG, None)
        if files is None:  # a command without settings
            return
        _warn_of_unknown_variables(arguments)
        names = [token.value for token in files.tokens]
        # The last file wins, and the first to fill an argument keeps it.
        for name in reversed(names):
            path = find_config(name)
            add_settings(read_config(path), str(path), arguments)

    def _record(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        for argument in arguments:
            if argument.tokens:
                token = argument.tokens[0]
                source = "command line" if token.source == "cli" else token.source
                is_variable = source == "environment"
                self.origins[argument.name] = f"{source} {token.keyword}" if is_variable else source


def find_config(name: str) -> Path:
    """The file that --config names: a path, or a preset of configs/ by name. Raises ConfigError."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    presets = _presets()
    if name in presets:
        return presets[name]
    raise ConfigError(
        f"--config {name} is neither a file nor a preset",
        hint=f"presets are: {', '.join(sorted(presets))}",
    )


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, by flag name without dashes in front. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} cannot be read: {reason}", hint="give a YAML file of `flag: value` lines"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a {type(content).__name__}, not settings",
            hint="give a YAML file of `flag: value` lines",
        )
    return {str(key): value for key, value in content.items()}


def add_settings(settings: Mapping[str, Any], source: str, arguments: ArgumentCollection) -> None:
    """Give `settings` to arguments that have no value yet. Raises ConfigError for a key that is no flag."""
    by_key = {name.lstrip("-").lower(): name for name in _names(arguments) if name != CONFIG_FLAG}
    filled = {id(argument) for argument in arguments if argument.tokens}
    given: dict[int, str] = {}
    for key, value in settings.items():
        name = by_key.get(key.replace("_", "-"))
        if name is None:
            raise ConfigError(
                f"{source} sets {key!r}, which is no setting", hint=_nearest(key.replace("_", "-"), by_key)
            )
        argument = arguments[name]
        if id(argument) in given:
            raise ConfigError(
                f"{source} sets {given[id(argument)]!r} and {key!r}, which are the same", hint="keep one"
            )
        given[id(argument)] = key
        if id(argument) in filled:
            continue
        _, is_repeatable = argument.token_count()
        if isinstance(value, list) and not is_repeatable:
            raise ConfigError(
                f"{source} gives {key!r} a list; it takes one value", hint=f"write `{key}: value`"
            )
        for index, text in enumerate(_texts(key, value, source)):
            argument.append(Token(keyword=key, value=text, source=source, index=index))


def _drop_service_links(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    # Links of Kubernetes and Docker put FORKPOINT_PORT=tcp://10.0.0.1:8000 beside a service `forkpoint`.
    for argument in arguments:
        if any(token.source == "environment" and _LINK.match(token.value) for token in argument.tokens):
            argument.tokens.clear()


def _refuse_fractions(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    # cyclopts rounds 2.5 to 2 where a whole number is wanted; nobody would see it.
    for argument in arguments:
        kinds = {argument.hint, *get_args(argument.hint)}
        if int not in kinds or float in kinds:
            continue
        for token in argument.tokens:
            if _is_number(token.value) and not token.value.lstrip("+-").isdecimal():
                raise ConfigError(
                    f"{token.keyword or argument.name} is {token.value}; it takes a whole number",
                    hint=f"change {argument.name}",
                )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _warn_of_unknown_variables(arguments: ArgumentCollection) -> None:
    # A warning, not an error: what the next version reads may be set already.
    known = {ENVIRONMENT_PREFIX + _variable(flag) for flag in _names(arguments)} | OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known and not _LINK_NAME.fullmatch(name):
            hint = _nearest(name, known)
            print(f"forkpoint: warning: environment variable {name} is no setting; {hint}", file=sys.stderr)


def _texts(key: str, value: object, source: str) -> Iterable[str]:
    values = value if isinstance(value, list) else [value]
    for one in values:
        if one is None or isinstance(one, (dict, list)):
            raise ConfigError(
                f"{source} gives {key!r} no plain value", hint=f"write `{key}: value`, or leave it out"
            )
        yield str(one)


def _names(arguments: ArgumentCollection) -> set[str]:
    """Every name of every setting, aliases too: `--page-size`, `--block-size`, `MODEL`."""
    return {name for argument in arguments for name in argument.names}


def _variable(flag: str) -> str:
    return flag.lstrip("-").upper().replace("-", "_")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else "`forkpoint serve --help` lists the settings"


def _presets() -> dict[str, Path]:
    # Path, not Traversable: an installed package of ours is always a folder on disk.
    folder = Path(str(importlib.resources.files("forkpoint.configs")))
    return {path.stem: path for path in folder.glob("*.yaml")}
