"""benchmarks/peers*.py: ratios, targets, foreign load, servers that are absent or do not start."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts in benchmarks/ import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


NAN = float("nan")


def test_a_ratio_is_taken_within_each_round() -> None:
    from peers_tables import Ratio, ratio

    key = ("stream8", "output")
    values = {"forkpoint": {key: [10.0, 40.0, NAN, 30.0]}, "vllm": {key: [10.0, 10.0, 5.0, NAN]}}
    assert ratio(values, key, "forkpoint", "vllm") == Ratio(2.5, 1.0, 4.0)
    assert ratio(values, key, "forkpoint", "llama.cpp") is None
    assert ratio(values, ("stream1", "tpot"), "forkpoint", "vllm") is None


def test_targets_know_which_way_is_better() -> None:
    from peers_tables import METRICS, TARGETS, Target

    assert Target("stream8", "output", 1.4).is_met(1.4) and not Target("stream8", "output", 1.4).is_met(1.39)
    assert Target("stream1", "tpot", 0.7).is_met(0.7) and not Target("stream1", "tpot", 0.7).is_met(0.71)
    assert all(target.key in METRICS for target in TARGETS)


def test_the_tables_tell_what_was_met_missed_and_not_measured() -> None:
    from peers_tables import as_markdown

    values = {
        "forkpoint": {("prefill1024", "prefill"): [130.0], ("stream8", "output"): [100.0, 90.0]},
        "vllm": {("prefill1024", "prefill"): [100.0], ("stream8", "output"): [100.0, 100.0]},
    }
    text = as_markdown(values, machine="a machine", versions={"vLLM": "1.2"}, notes=["it rained"])
    assert "| 1.30 (1.30 to 1.30) | at least 1.2 | met |" in text
    assert "| 0.95 (0.90 to 1.00) | at least 1.4 | **missed** |" in text
    assert "not measured" in text and "a machine" in text and "* it rained" in text
    assert "| 95.0 (90.0 to 100.0) | 100 (100 to 100) |" in text


def test_values_have_a_place_for_each_round() -> None:
    from peers import Log, Measured

    log = Log([Measured("a", 0, "c", 0.0, {"m": 1.0}), Measured("a", 2, "c", 0.0, {"m": 3.0})])
    row = log.values(["a", "b"], 3)["a"][("c", "m")]
    assert (row[0], row[2]) == (1.0, 3.0) and math.isnan(row[1])


def test_each_server_begins_a_round_once() -> None:
    from peers import rotated
    from peers_servers import PeerServer

    servers = [PeerServer(name, ()) for name in "abc"]
    orders = ["".join(server.name for server in rotated(servers, number)) for number in range(3)]
    assert orders == ["abc", "bca", "cab"]


def test_a_disturbed_cell_is_measured_again_and_the_quieter_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import peers
    from peers_cells import CELLS

    shares, seeds = iter([0.5, 0.2]), []

    class Meter:
        def __init__(self, _: object) -> None: ...
        def foreign_share(self) -> float:
            return next(shares)

    def run_cell(cell: object, url: str, tokenizer: Path, seed: int) -> dict[str, float]:
        seeds.append(seed)
        return {"m": float(len(seeds))}

    monkeypatch.setattr(peers, "CpuMeter", Meter)
    monkeypatch.setattr(peers, "run_cell", run_cell)
    server = type("Running", (), {"url": "u"})()
    assert peers.measure_cell(CELLS[0], server, Path(), 7, 0.1) == (0.2, {"m": 2.0})
    assert len(set(seeds)) == 2, "the second run does not find the first one's prompts"
    shares, seeds = iter([0.05]), []
    assert peers.measure_cell(CELLS[0], server, Path(), 7, 0.1) == (0.05, {"m": 1.0})


def test_other_work_on_the_machine_is_seen_and_our_own_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import peers
    import psutil

    class Times(tuple[float, ...]):
        idle = property(lambda self: self[0])

    class Process:
        now = (0.0, 0.0)

        def cpu_times(self) -> object:
            user, children = self.now
            return type(
                "T", (), {"user": user, "system": 0.0, "children_user": children, "children_system": 0.0}
            )

    server = type("Running", (), {"cpu_s": lambda self: self.cpu, "cpu": 0.0})()
    monkeypatch.setattr(psutil, "cpu_times", lambda: Times((0.0, 0.0)))
    monkeypatch.setattr(psutil, "Process", Process)
    meter = peers.CpuMeter(server)
    # Ten seconds of two cores: 8 idle, 12 busy, of which 6 the server's, 3 its clients', 3 somebody else's.
    monkeypatch.setattr(psutil, "cpu_times", lambda: Times((8.0, 12.0)))
    server.cpu, Process.now = 6.0, (1.0, 2.0)
    assert meter.foreign_share() == pytest.approx(3 / 20)


def test_absent_servers_are_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peers_models import PeerModels
    from peers_servers import find_servers

    monkeypatch.setenv("PATH", str(tmp_path))
    models = PeerModels(tmp_path / "q4", tmp_path / "bf16", tmp_path)
    servers, absent = find_servers(models, vllm=tmp_path / "nowhere", llama=None)
    assert [server.name for server in servers] == ["forkpoint", "forkpoint-int8"]
    assert "vLLM is left out" in absent[0] and "llama.cpp is left out" in absent[1]
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    servers, absent = find_servers(models, vllm=Path(sys.executable), llama=None)
    assert [server.name for server in servers] == [
        "forkpoint", "forkpoint-int8", "vllm", "llama.cpp", "llama.cpp-q4"
    ]  # fmt: skip
    assert absent == []


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_ends_with_all_its_children(tmp_path: Path) -> None:
    import psutil
    from peers_servers import PeerServer, running

    server = PeerServer("one", (sys.executable, "-c", SERVER, "{port}"))
    with running(server, tmp_path) as alive:
        assert alive.start_s > 0 and alive.cpu_s() > 0
        assert alive.peak_rss_bytes() > 2 * 4_000_000, "its child counts too"
        child = int((tmp_path / "one.log").read_text().split()[0])
        assert psutil.pid_exists(child)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_one_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    from peers_servers import PeerServer, ServerFailed, running

    server = PeerServer("two", (sys.executable, "-c", "raise SystemExit('no such model')"))
    with pytest.raises(ServerFailed, match="two did not start:\n.*no such model"), running(server, tmp_path):
        pass


def test_figures_of_a_cell_are_read_out_of_the_benchs_json(monkeypatch: pytest.MonkeyPatch) -> None:
    import peers_cells

    requests = [
        {"error": None, "is_warmup": warm, "prompt_tokens": 100, "ttft_s": ttft, "turn": turn}
        for warm, ttft, turn in ((True, 9.0, 0), (False, 0.5, 0), (False, 0.2, 1), (False, 0.4, 2))
    ]
    result = {"failed": 0, "requests": requests, "token_hit_rate": None, "output_throughput": 7}

    def run(command: list[str], **_: object) -> None:
        Path(command[command.index("--json") + 1]).write_text(json.dumps(result))

    monkeypatch.setattr("peers_cells.subprocess.run", run)
    cells = {cell.name: cell for cell in peers_cells.CELLS}
    assert peers_cells.run_cell(cells["prefill1024"], "u", Path(), 1) == {"prefill": 250.0}
    chat = peers_cells.run_cell(cells["chat"], "u", Path(), 1)
    assert chat["ttft"] == pytest.approx(300) and chat["output"] == 7 and math.isnan(chat["cached"])
    result["failed"], result["errors"] = 1, ["no"]
    with pytest.raises(ValueError, match="1 requests failed"):
        peers_cells.run_cell(cells["chat"], "u", Path(), 1)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    from peers_tables import METRICS, plot

    values = {
        name: {key: [1.0 + place] for key in METRICS} for place, name in enumerate(("forkpoint", "vllm"))
    }
    plot(tmp_path / "p.png", values, ["vllm", "llama.cpp"], "here")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
