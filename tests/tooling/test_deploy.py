"""deploy/: what cannot be run by tests names only flags, paths, ports, probes and values that exist.

No test starts a container, a cluster or systemd; what a wrong name would break there is looked up here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.http_server import serving

from forkpoint.configs.settings import ServeSettings
from forkpoint.server.cli_layers import OTHER_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "forkpoint"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
TEMPLATES = sorted((CHART / "templates").iterdir())
COMPOSE_FILES = sorted(DEPLOY.glob("compose*.yaml"))
UNIT = DEPLOY / "systemd" / "forkpoint.service"
SETTINGS = ServeSettings()
# Kept in run.py for the last events of requests that were ended.
FAREWELL_S = 2


def files_with_flags() -> list[Path]:
    return [*DOCKERFILES, *TEMPLATES, *COMPOSE_FILES, UNIT, CHART / "values.yaml"]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text("utf-8"))
    return content


def unit() -> Mapping[str, list[str]]:
    """Values by key; a key may come more than once, which configparser would refuse."""
    values: dict[str, list[str]] = {}
    for line in UNIT.read_text("utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            values.setdefault(key, []).append(value)
    return values


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag of `forkpoint serve`, aliases too, as its help lists them."""
    command = [str(Path(sys.executable).with_name("forkpoint")), "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z][a-z-]+[a-z]", done.stdout))


def test_every_flag_of_the_server_exists(flags: set[str]) -> None:
    # Flags of other programs that these files call.
    others = {
        *("--build-arg", "--gpus", "--build", "--extra-index-url", "--no-deps", "--wheel-dir", "--list"),
        *(
            "--no-install-recommends",
            "--gid",
            "--uid",
            "--no-create-home",
            "--home-dir",
            "--shell",
            "--owner",
        ),
        *("--group", "--directory", "--from", "--interval", "--timeout", "--retries", "--start-period"),
        *("--namespace",),
    }
    used = {
        (path.name, flag)
        for path in files_with_flags()
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text("utf-8"))
    }
    assert ("deployment.yaml", "--shutdown-timeout") in used
    assert {(name, flag) for name, flag in used if flag not in flags | others} == set()


def test_every_variable_of_the_server_exists() -> None:
    known = {f"FORKPOINT_{name.upper()}" for name in ServeSettings.__dataclass_fields__} | OTHER_VARIABLES
    used = {
        (path.name, name)
        for path in files_with_flags()
        for name in re.findall(r"\bFORKPOINT_[A-Z_]+", path.read_text("utf-8"))
    }
    assert used
    assert {(path, name) for path, name in used if name not in known} == set()


# ---- containers


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_a_dockerfile_copies_exists_and_reaches_the_builder(dockerfile: Path) -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")
    }
    copied = [
        name
        for line in dockerfile.read_text("utf-8").splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert set(copied) == allowed
    assert all((ROOT / name).exists() for name in copied)
    # All that pyproject.toml packs, and the files that it reads.
    packed = re.findall(r'^"forkpoint\.\w+" = "(\w+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert {*packed, "pyproject.toml", "README.md", "LICENSE"} == allowed


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_container_is_no_root_stops_gently_and_is_asked_for_its_health(dockerfile: Path) -> None:
    *_, final = dockerfile.read_text("utf-8").split("\nFROM ")
    assert "USER 10001:10001" in final
    assert "STOPSIGNAL SIGTERM" in final
    assert f"EXPOSE {SETTINGS.port}" in final and f"FORKPOINT_PORT={SETTINGS.port}" in final
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", final, re.M)
    assert json.loads(entry)[-2:] == ["forkpoint", "serve"]
    assert "VOLUME /cache" in final and "HF_HOME=/cache/" in final and "FORKPOINT_CACHE=/cache/" in final


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_health_check_of_a_container_tells_a_well_server_from_a_stuck_one(dockerfile: Path) -> None:
    (check,) = re.findall(r"^    CMD (\[.*\])$", dockerfile.read_text("utf-8"), re.M)
    python, *arguments = json.loads(check)
    assert python == "python"
    with serving() as world:
        environment = {"FORKPOINT_PORT": world.url.rpartition(":")[2]}

        def exit_code() -> int:
            command = [sys.executable, *arguments]
            return subprocess.run(command, env=environment, capture_output=True, check=False).returncode

        assert exit_code() == 0
        world.engine.seconds_since_step = 61.0
        assert exit_code() != 0


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_torch_is_pinned_as_the_project_pins_it(dockerfile: Path) -> None:
    (pin,) = re.findall(r'"torch==([0-9.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert f"ARG TORCH_VERSION={pin}\n" in dockerfile.read_text("utf-8")


@pytest.mark.parametrize("name", [path.name for path in COMPOSE_FILES])
def test_what_compose_mounts_and_builds_exists(name: str) -> None:
    content = compose(name)
    volumes = content.get("volumes", {})
    for service in content["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in volumes or (DEPLOY / source).exists(), mount
        if "build" in service:
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_compose_lets_the_server_drain_and_prometheus_find_it() -> None:
    services = compose()["services"]
    server = services["forkpoint"]
    timeout = float(server["command"][server["command"].index("--shutdown-timeout") + 1])
    assert int(server["stop_grace_period"].removesuffix("s")) > timeout + FAREWELL_S
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"forkpoint:{SETTINGS.port}"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "there is no API key"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = compose()["services"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text("utf-8"))[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/forkpoint.yaml").read_text("utf-8"))["providers"]
    mounts = dict(mount.removesuffix(":ro").split(":") for mount in services["grafana"]["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert Path(mounts["./grafana/forkpoint.json"]).parent == Path(provider["options"]["path"])
    shown_first = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert shown_first == mounts["./grafana/forkpoint.json"]


# ---- Kubernetes


def values_used() -> Iterator[tuple[str, str]]:
    for path in TEMPLATES:
        for name in re.findall(r"\.Values((?:\.\w+)+)", path.read_text("utf-8")):
            yield path.name, name.removeprefix(".")


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


def test_every_value_that_a_template_reads_is_declared_and_every_declared_one_is_read() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    declared, used = set(leaves(values)), {name for _, name in values_used()}
    assert used - declared == set()
    # A whole that is passed on reads its parts; a part that is read excuses the whole.
    unread = {
        name
        for name in declared
        if not any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in used)
    }
    assert unread == set()


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_braces_and_blocks_of_a_template_balance(template: Path) -> None:
    text = template.read_text("utf-8")
    actions = re.findall(r"\{\{-?\s*(.*?)\s*-?\}\}", text, re.S)
    assert text.count("{{") == text.count("}}") == len(actions)
    words = Counter(action.split()[0] for action in actions if action)
    opened = sum(words[word] for word in ("if", "with", "range", "define", "block"))
    assert opened == words["end"]
    for action in actions:
        assert action.count("(") == action.count(")")


def test_every_named_template_is_defined() -> None:
    text = "".join(path.read_text("utf-8") for path in TEMPLATES)
    included = set(re.findall(r'include "([^"]+)"', text))
    assert included == set(re.findall(r'define "([^"]+)"', text))


def test_probes_ask_for_paths_that_answer_without_a_key() -> None:
    text = (CHART / "templates" / "deployment.yaml").read_text("utf-8")
    probes = dict(re.findall(r"(\w+)Probe:\n\s+httpGet:\n\s+path: (\S+)\n\s+port: http\n", text))
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/livez"}
    with serving(api_keys=("secret",)) as world:
        for path in probes.values():
            assert world.http.get(path).status_code == 200
    assert f"containerPort: {SETTINGS.port}" in text and f'"{SETTINGS.port}"' in text


def test_a_pod_gets_more_time_to_end_than_its_drain_takes() -> None:
    text = (CHART / "templates" / "deployment.yaml").read_text("utf-8")
    before = r"terminationGracePeriodSeconds: \{\{ add \.Values\.preStopSeconds \.Values\.shutdownTimeout "
    (extra,) = re.findall(before + r"(\d+) \}\}", text)
    assert int(extra) > FAREWELL_S
    assert "--shutdown-timeout\n            - {{ .Values.shutdownTimeout | quote }}" in text


def test_no_service_can_overwrite_the_settings_of_a_pod() -> None:
    # A service named forkpoint sets FORKPOINT_PORT=tcp://ADDRESS:PORT in pods with service links.
    assert "enableServiceLinks: false" in (CHART / "templates" / "deployment.yaml").read_text("utf-8")


def test_a_pod_runs_as_the_user_of_the_images() -> None:
    text = (CHART / "templates" / "deployment.yaml").read_text("utf-8")
    (user,) = re.findall(r"runAsUser: (\d+)", text)
    (group,) = re.findall(r"runAsGroup: (\d+)", text)
    assert f"fsGroup: {group}" in text
    for dockerfile in DOCKERFILES:
        assert f"USER {user}:{group}\n" in dockerfile.read_text("utf-8")


def test_autoscaling_looks_at_a_metric_that_exists() -> None:
    text = (CHART / "templates" / "autoscaling.yaml").read_text("utf-8")
    names = set(re.findall(r"\bforkpoint_\w+", text))
    assert names == {"forkpoint_requests_waiting"}
    with serving() as world:
        assert "\nforkpoint_requests_waiting " in world.http.get("/metrics").text


def test_the_chart_has_the_version_of_the_project() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["appVersion"] == version


# ---- systemd


def test_the_unit_lets_the_server_drain_and_leaves_the_engine_to_it() -> None:
    values = unit()
    (command,) = values["ExecStart"]
    timeout = float(command.split()[command.split().index("--shutdown-timeout") + 1])
    assert float(values["TimeoutStopSec"][0]) > timeout + FAREWELL_S
    assert values["Type"] == ["notify"] and values["KillMode"] == ["mixed"]
    assert values["TimeoutStartSec"] == ["infinity"]


def test_the_unit_does_not_repeat_a_start_that_cannot_succeed(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("forkpoint")),
        "serve",
        str(tmp_path / "nothing"),
        "--port",
        "0",
    ]
    status = subprocess.run(command, capture_output=True, check=False).returncode
    assert unit()["RestartPreventExitStatus"] == [str(status)]


def test_the_unit_names_no_key_twice_but_environment() -> None:
    assert {key for key, values in unit().items() if len(values) > 1} == {"Environment"}


# ---- all of them


@pytest.mark.parametrize(
    "path",
    sorted({*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")} - {*TEMPLATES}),
    ids=lambda path: str(path.relative_to(DEPLOY)),
)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text("utf-8")), dict)
