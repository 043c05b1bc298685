"""Asks /health all the time from a process of its own, and measures how busy the machine is meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

PERIOD_S = 0.01
# What the probe computes between two answers, now and then, to see how long that takes.
SPIN_S = 0.02
_ANSWERS_PER_SPIN = 10


@dataclass
class HealthTimes:
    """Filled when the probe ends. health_s: seconds that each answer took. statuses: those that came.

    spin_s: seconds that SPIN_S of processor time took beside everything else that ran.
    """

    health_s: list[float] = field(default_factory=list)
    spin_s: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    @property
    def worst_s(self) -> float:
        """The longest answer as it would have been with a processor for the server alone."""
        return max(self.health_s) * SPIN_S / max(self.spin_s)

    def __str__(self) -> str:
        ordered = sorted(self.health_s)
        shares = [
            f"p{100 * q:g} {1e3 * ordered[round(q * (len(ordered) - 1))]:.1f}" for q in (0.5, 0.9, 0.99, 1)
        ]
        slow = max(self.spin_s) / SPIN_S
        return f"{len(ordered)} answers of /health, ms: {', '.join(shares)}; slowed down {slow:.1f} times"


@contextlib.contextmanager
def probing_health(url: str) -> Iterator[HealthTimes]:
    """Ask until the end of the block."""
    times = HealthTimes()
    # No site packages: it starts in milliseconds.
    command = [sys.executable, "-I", "-S", __file__, url.removeprefix("http://")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdin is not None and probe.stdout is not None
        assert probe.stdout.readline() == "ready\n"
        try:
            yield times
        finally:
            output, _ = probe.communicate("")
    record = json.loads(output)
    times.health_s, times.spin_s, times.statuses = record["health_s"], record["spin_s"], record["statuses"]
    assert len(times.health_s) > 5, "too short to say anything"


def _probe(address: str) -> None:
    _say("ready")
    health_s, spin_s, statuses = [], [_spin()], []
    while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
        begin = time.perf_counter()
        statuses.append(_status(address))
        health_s.append(time.perf_counter() - begin)
        if len(statuses) % _ANSWERS_PER_SPIN == 0:
            spin_s.append(_spin())
    _say(json.dumps({"health_s": health_s, "spin_s": spin_s, "statuses": statuses}))


def _status(address: str) -> int:
    """Of /health, over a connection of its own as most probes make one."""
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def _spin() -> float:
    begin, cpu_begin = time.perf_counter(), time.process_time()
    while time.process_time() - cpu_begin < SPIN_S:
        pass
    return time.perf_counter() - begin


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _probe(sys.argv[1])
