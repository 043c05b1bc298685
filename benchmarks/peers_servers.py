"""The servers that are compared: how each is found, started, waited for, and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from peers_models import PeerModels

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
CONTEXT = 8192
SLOTS = 8


class ServerFailed(Exception):
    """A server did not come up; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class PeerServer:
    """One server with one set of weights. only: the cells that it is asked; None: all of them."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    only: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. start_s: from its command to its first 200."""

    server: PeerServer
    process: psutil.Process
    url: str
    start_s: float

    def cpu_s(self) -> float:
        """Processor time of the server with all its children so far."""
        return sum(_of_tree(self.process, lambda each: sum(each.cpu_times()[:2])))

    def peak_rss_bytes(self) -> int:
        """Sum of the peaks of resident memory of its processes; pages that they share count twice."""
        return int(sum(_of_tree(self.process, _peak_rss)))


def find_servers(
    models: PeerModels, *, vllm: Path | None, llama: Path | None
) -> tuple[list[PeerServer], list[str]]:
    """The servers that can run here, ours first; and a sentence for each that is absent.

    vllm: a Python that can import vllm. llama: the llama-server binary; None: looked for on PATH.
    """
    threads = str(psutil.cpu_count(logical=False) or 1)
    forkpoint = str(Path(sys.executable).with_name("forkpoint"))
    ours: tuple[str, ...] = (forkpoint, "serve", str(models.bf16_dir), "--dtype", "bfloat16")
    ours += ("--context-length", str(CONTEXT))
    ours += ("--served-model-name", "demo", "--log-format", "json", "--port", "{port}")
    decoding = frozenset({"stream1", "stream8"})
    servers = [
        PeerServer("forkpoint", ours, ready_path="/ready"),
        PeerServer("forkpoint-int8", (*ours, "--quantization", "int8"), ready_path="/ready", only=decoding),
    ]
    absent = []
    if vllm is not None and vllm.exists():
        command: tuple[str, ...] = (str(vllm), "-m", "vllm.entrypoints.openai.api_server")
        command += ("--model", str(models.bf16_dir), "--enable-prompt-tokens-details")
        command += ("--served-model-name", "demo", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT))
        command += ("--enable-prefix-caching", "--host", "127.0.0.1", "--port", "{port}")
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        servers.append(PeerServer("vllm", command, environment))
    else:
        absent.append(f"vLLM is left out: {vllm or 'no Python with it was given'} (--vllm)")
    found = shutil.which("llama-server") if llama is None else str(llama)
    if found is not None and Path(found).exists():
        for name, file, only in (
            ("llama.cpp", models.bf16_gguf, None), ("llama.cpp-q4", models.q4_gguf, decoding)
        ):  # fmt: skip
            command = (found, "-m", str(file), "--alias", "demo", "-t", threads, "-np", str(SLOTS), "-cb")
            command += ("-c", str(CONTEXT * SLOTS), "--host", "127.0.0.1", "--port", "{port}")
            servers.append(PeerServer(name, command, only=only))
    else:
        absent.append(f"llama.cpp is left out: {found or 'no llama-server on PATH'} (--llama)")
    return servers, absent


@contextlib.contextmanager
def running(server: PeerServer, logs: Path) -> Iterator[Running]:
    """Start it on a free port, wait until it answers, and end it with everything that it started.

    Raises ServerFailed with the tail of its log, which is kept at logs/NAME.log.
    """
    port = _free_port()
    command = [part.replace("{port}", str(port)) for part in server.command]
    log = logs / f"{server.name}.log"
    begin_s = time.perf_counter()
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
    process = psutil.Process(child.pid)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _answers(f"{url}{server.ready_path}"):
            if child.poll() is not None or time.perf_counter() - begin_s > START_TIMEOUT_S:
                raise ServerFailed(f"{server.name} did not start:\n{tail(log)}")
            time.sleep(POLL_S)
        yield Running(server, process, url, time.perf_counter() - begin_s)
    finally:
        _end(child, process)


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log, for a message."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line[:200]}" for line in text[-lines:])


def version_of(command: Sequence[str]) -> str:
    """What a command prints, the first line that has a digit; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.strip() for line in lines if any(letter.isdigit() for letter in line)), "")


def _end(child: subprocess.Popen[bytes], process: psutil.Process) -> None:
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_TIMEOUT_S)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    child.wait()
    psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)


def _of_tree(process: psutil.Process, figure: Callable[[psutil.Process], float]) -> Iterator[float]:
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield figure(each)


def _peak_rss(process: psutil.Process) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return process.memory_info().rss


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
