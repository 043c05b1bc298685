"""Binds the server's address, early and with errors that say which flag to change."""

from __future__ import annotations

import errno
import socket

from forkpoint.configs.errors import ConfigError


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its backlog until the server runs. Port 0 takes a free one.

    Raises ConfigError with the flag as hint.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"the host {host!r} has no address: {error}", hint="choose another one with --host"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use by another process",
            hint="choose another one with --port; 0 takes any that is free",
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"port {port} on {host} needs rights that this user does not have",
            hint="choose one from 1024 on with --port",
        )
    return ConfigError(
        f"cannot listen on {host}, port {port}: {error.strerror}",
        hint="choose an address of this machine with --host",
    )
