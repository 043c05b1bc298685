"""`forkpoint serve` under a service manager: what it says on NOTIFY_SOCKET from the start to the end."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from pathlib import Path

import pytest
from support.served import PATIENCE_S, serve


def test_a_service_manager_hears_of_loading_readiness_watchdog_and_end(
    letters_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[list[str]] = []
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        is_fed = threading.Event()

        def listen() -> None:
            while (message := manager.recv(65536).decode()) != "end of the test":
                messages.append(message.split("\n"))
                if message == "WATCHDOG=1" and ["READY=1"] in [lines[:1] for lines in messages]:
                    is_fed.set()

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            with serve(letters_dir) as served:
                assert is_fed.wait(PATIENCE_S), messages
                # Said when it is true, not before.
                assert served.http.get("/ready").status_code == 200
                served.process.send_signal(signal.SIGTERM)
                assert served.exit_code() == 0
        finally:
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as last:
                last.sendto(b"end of the test", str(tmp_path / "notify"))
            listener.join(PATIENCE_S)
    kinds = [lines[0].partition("=")[0] for lines in messages]
    assert "READY" in kinds and kinds.index("STATUS") < kinds.index("READY") < kinds.index("STOPPING")
    assert kinds.count("READY") == kinds.count("STOPPING") == 1
    assert messages[kinds.index("READY")][1].startswith(f"STATUS=serving {letters_dir.name} on http://")
