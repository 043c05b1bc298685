"""Tells a service manager, as systemd's `Type=notify` wants it, how far the server is.

The protocol is sd_notify(3): lines of `NAME=value` in one datagram to a Unix socket. It is a few lines of
code; the libraries for it are bindings of libsystemd, which containers do not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping

import structlog

# The kernel keeps ten messages for a manager that is slow to read; then a sender waits. Only what decides
# over the life of the server may hold up its event loop.
_PATIENCE_S = 5.0

_log = structlog.stdlib.get_logger(__name__)


class ServiceNotifier:
    """Sends states to the service manager; without an address every call does nothing.

    address: a path, or a name in the abstract namespace with @ in front. watchdog_s: the manager ends the
    server if it hears nothing for so long; None: it does not watch. What cannot be sent is logged, never
    raised: NOTIFY_SOCKET of a manager that is gone must not end a server. Mutable: keeps the last progress.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s
        self._status = ""
        self._is_silent = False

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], process_id: int) -> ServiceNotifier:
        """What NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID ask for.

        A watchdog meant for another process, whose environment was inherited, is none of ours.
        """
        address = environment.get("NOTIFY_SOCKET") or None
        interval_us = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(process_id)) == str(process_id)
        is_watched = address is not None and is_ours and interval_us.isdecimal() and int(interval_us) > 0
        return cls(address, int(interval_us) / 1e6 if is_watched else None)

    def progress(self, what: str, done: int, total: int) -> None:
        """A stage of the start, in whole per cent. Cheap: repeats nothing."""
        status = f"{what}: {100 * done // total if total > 0 else 100} %"
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Requests are served from now on."""
        self._send("READY=1", f"STATUS={status}", wait_s=_PATIENCE_S)

    def stopping(self, status: str) -> None:
        """The server drains and will end."""
        self._send("STOPPING=1", f"STATUS={status}", wait_s=_PATIENCE_S)

    async def feed_watchdog(self, is_well: Callable[[], bool]) -> None:
        """Say twice per interval that all is well, while it is. Ends at once if nobody watches."""
        while self._watchdog_s is not None:
            if is_well():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, *lines: str, wait_s: float = 0.0) -> None:
        """wait_s: how long the manager may take before this message is dropped."""
        if self._address is None or self._is_silent:
            return
        # A leading @ stands for the zero byte of the abstract namespace.
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(" ".join(line.splitlines()) for line in lines).encode("utf-8", "replace")
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as channel:
                channel.settimeout(wait_s)
                channel.connect(name)
                channel.send(message)
        except (BlockingIOError, TimeoutError):
            _log.warning("notify_dropped", message=lines[0])
        except (OSError, ValueError) as error:
            self._is_silent = True  # said once: progress comes a hundred times
            _log.warning("notify_failed", socket=self._address, error=str(error))
