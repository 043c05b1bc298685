"""The command line: which settings it takes, which layer wins, what it refuses, and in what words."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from forkpoint.configs.errors import ConfigError
from forkpoint.configs.settings import ServeSettings
from forkpoint.configs.settings_mapping import (
    default_model_name,
    engine_config,
    server_config,
)
from forkpoint.model.native import library
from forkpoint.server.cli import run

# Every flag and alias of the published interface, with a value that is accepted.
FLAGS = """
--host 0.0.0.0
--port 9000
--served-model-name mine
--api-key secret
--metrics-without-key
--allowed-origins https://page.example:8080
--allowed-origins *
--device cpu
--dtype float32
--kv-cache-dtype bfloat16
--load-format auto
--load-format safetensors
--load-format dummy
--generation-config auto
--generation-config none
--quantization none
--quantization int8
--attention-backend torch
--threads 2
--threads auto
--context-length 4096
--max-model-len 4096
--page-size 4
--block-size 4
--max-running-requests 3
--max-num-seqs 3
--max-queued-requests 7
--chunked-prefill-size 128
--max-num-batched-tokens 128
--kv-cache-memory-bytes 1000000
--mem-fraction-static 0.5
--gpu-memory-utilization 0.5
--max-total-tokens 2048
--swa-total-tokens 1024
--swa-full-tokens-ratio 0.5
--disable-radix-cache
--retention anchors
--retention branch
--retention tail
--radix-eviction-policy cost
--radix-eviction-policy lru
--disable-rebuild
--rebuild-depth exact
--rebuild-depth 4
--tool-call-parser hermes
--tool-call-parser none
--reasoning-parser qwen3
--grammar-backend llguidance
--tp-size 1
--tensor-parallel-size 1
--log-level debug
--log-format json
--shutdown-timeout 5
--otlp-traces-endpoint http://localhost:4318
"""

UNBUILT = """
--quantization int4
--attention-backend flashinfer
--tp-size 2
--grammar-backend xgrammar
"""


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FORKPOINT_")]:
        monkeypatch.delenv(name)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[str, str]]:
    """show-config's rows: setting to (value, origin)."""
    assert run(["show-config", *arguments]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:]]
    return {setting: (value, origin.strip()) for setting, value, origin in rows}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a refused command prints to stderr: always status 2, one line and perhaps a hint, no traceback."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, *rest = captured.err.splitlines()
    assert first.startswith("forkpoint: error: ")
    assert [line.split()[0] for line in rest] in ([], ["hint:"])
    return captured.err


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_an_unknown_parser_is_refused_with_the_list(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "serve", "demo", flag, "nonsense")
    assert "nonsense" in error
    assert "none" in error and "mistral" in error


@pytest.mark.parametrize("flag", FLAGS.strip().splitlines())
def test_the_flag_is_taken(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, *flag.split())
    assert [row for row in rows.values() if row[1] == "command line"]


@pytest.mark.parametrize("flag", UNBUILT.strip().splitlines())
def test_what_is_not_built_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{flag} is not built yet" in refusal(capsys, "serve", *flag.split())


def test_defaults_are_the_best_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys)
    assert rows["MODEL"] == ("demo", "default")
    assert rows["--retention"] == ("anchors", "default")
    assert rows["--radix-eviction-policy"] == ("cost", "default")
    assert rows["--context-length"] == ("auto", "default")
    assert {origin for _, origin in rows.values()} == {"default"}


def test_each_layer_wins_over_the_ones_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("port: 1\npage-size: 1\nmax-model-len: 1\nhost: a\nmodel: m\n")
    second.write_text("port: 2\npage_size: 2\ncontext-length: 2\n")
    monkeypatch.setenv("FORKPOINT_PORT", "3")
    monkeypatch.setenv("FORKPOINT_BLOCK_SIZE", "3")

    rows = shown(capsys, "--config", str(first), "--config", str(second), "--port", "4")

    assert rows["--port"] == ("4", "command line")
    assert rows["--page-size"] == ("3", "environment FORKPOINT_BLOCK_SIZE")
    assert rows["--context-length"] == ("2", str(second))
    assert rows["--host"] == ("a", str(first))
    assert rows["MODEL"] == ("m", str(first))


def test_service_links_of_kubernetes_are_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORKPOINT_PORT", "tcp://10.0.0.1:8000")
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"FORKPOINT_{name}", "10.0.0.1")
    assert shown(capsys)["--port"] == ("8000", "default")
    (tmp_path / "own.yaml").write_text("port: 5\n")
    assert run(["show-config", "--config", str(tmp_path / "own.yaml")]) == 0
    output = capsys.readouterr()
    assert str(tmp_path / "own.yaml") in output.out, "a file fills what the link left open"
    assert "warning" not in output.err


def test_files_may_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("port: 5\n")
    monkeypatch.setenv("FORKPOINT_CONFIG", str(tmp_path / "mine.yaml"))
    assert shown(capsys)["--port"] == ("5", str(tmp_path / "mine.yaml"))


def test_a_preset_is_named_without_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    value, origin = shown(capsys, "--config", "low-memory")["--max-total-tokens"]
    assert value != "auto"
    assert origin.endswith("configs/low-memory.yaml")


def test_keys_are_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("api-key: [topsecret, secretagain]\n")
    assert run(["show-config", "--config", str(tmp_path / "mine.yaml")]) == 0
    output = capsys.readouterr()
    assert "secret" not in output.out + output.err
    assert "********, ********" in output.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("page-sze: 4", "did you mean page-size?"),
        ("config: other.yaml", "'config', which is no setting"),
        ("page-size: [1, 2]", "gives 'page-size' a list"),
        ("page-size:", "gives 'page-size' no plain value"),
        ("page-size: {a: 1}", "gives 'page-size' no plain value"),
        ("page-size: 2.5", "page-size is 2.5; it takes a whole number"),
        ("page-size: 0", "--page-size is 0; it must be at least 1"),
        ("disable-radix-cache: perhaps", 'unable to convert "perhaps" into bool'),
        ("page-size: 4\nblock-size: 4", "which are the same"),
        ("[1, 2]", "holds a list, not settings"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    answer = refusal(capsys, "show-config", "--config", str(path))
    assert message in answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["talk"], 'Unknown command "talk"'),
        (["show-config", "--allowed-origins", "https://page.example/"], "is no origin"),
        (["show-config", "--allowed-origins", "page.example"], "is no origin"),
        (["serve", "--prot", "1"], "Did you mean --port?"),
        (["serve", "--port", "http"], 'unable to convert "http" into int'),
        (["serve", "--port", "65536"], "--port is 65536; it must be 0 to 65535"),
        (["serve", "--device", "tpu"], '"tpu" for --device'),
        (["serve", "--context-length", "1e3"], "it takes a whole number"),
        (["serve", "--mem-fraction-static", "nan"], "--mem-fraction-static is nan"),
        (["serve", "--mem-fraction-static", "1.5"], "must be above 0 and at most 1"),
        (["serve", "--threads", "0"], "--threads is 0; it must be 1 to 1024"),
        (["serve", "--shutdown-timeout", "inf"], "--shutdown-timeout is inf"),
        (["serve", "--swa-total-tokens", "9", "--swa-full-tokens-ratio", "0.5"], "both set"),
        (["serve", "--chat-template", "/does/not/exist"], "--chat-template /does/not/exist is not a file"),
        (["serve", "--api-key-file", "/does/not/exist"], "--api-key-file /does/not/exist cannot be read"),
        (["serve", "--api-key", ""], "an API key is empty"),
        (["show-config", "--config", "tiny"], "presets are: low-memory"),
        (["serve", "one", "two"], "two"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *arguments)


def test_a_misspelt_variable_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORKPOINT_PAGESIZE", "4")
    assert run(["show-config"]) == 0
    assert "did you mean FORKPOINT_PAGE_SIZE?" in capsys.readouterr().err


def test_a_taken_port_is_said_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answer = refusal(capsys, "serve", "/does/not/exist", "--port", str(port))
    assert f"port {port} on 127.0.0.1 is in use" in answer
    assert "--port" in answer.splitlines()[1]


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_check_env_finds_this_environment_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-env"]) == 0
    output = capsys.readouterr().out
    assert "torch" in output
    assert "MISSING" not in output


def test_check_env_says_whether_the_kernels_are_built_and_how_to_build_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels_line() -> str:
        assert run(["check-env"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernels")]
        return line

    as_built = kernels_line()
    if library.library() is not None:
        assert "built, for AVX2" in as_built and as_built.rstrip().endswith("ok")
    monkeypatch.setattr(library, "library_file", lambda: None)
    assert "not built" in kernels_line() and "install a C++ compiler" in kernels_line()


def test_auto_leaves_the_choice_to_the_engine() -> None:
    config = engine_config(ServeSettings(), Path("model"))
    assert config.context_length is None
    assert config.num_threads is None
    assert config.mem_fraction_static is None
    assert config.enable_radix_cache


def test_settings_reach_the_engine() -> None:
    pools = engine_config(ServeSettings(max_total_tokens=100, swa_total_tokens=50), Path("model"))
    assert (pools.full_tokens, pools.swa_tokens) == (100, 50)
    cache = engine_config(ServeSettings(disable_radix_cache=True, retention="tail"), Path("model"))
    assert (cache.enable_radix_cache, cache.retention) == (False, "tail")
    assert engine_config(ServeSettings(load_format="dummy"), Path("model")).load_format == "dummy"
    assert engine_config(ServeSettings(threads=3), Path("model")).num_threads == 3


@pytest.mark.parametrize("model", ["demo", "demo-chat", "some.gguf"])
def test_gguf_is_refused_where_only_safetensors_are_wanted(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--port", "0", "--load-format", "safetensors")
    assert f"{model} is a GGUF file" in refusal(capsys, "serve", model, *flags)


def test_keys_come_from_flags_and_from_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\none\n\n  two  \n")
    config = server_config(ServeSettings(api_key=("zero",), api_key_file=keys), "demo")
    assert config.api_keys == ("zero", "one", "two")


def test_a_key_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        server_config(ServeSettings(api_key_file=tmp_path / "keys"), "demo")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("google/gemma-3-270m", "gemma-3-270m"),
        ("google/gemma-3-270m@v1", "gemma-3-270m"),
        ("google/gemma-3-270m@refs/pr/3", "gemma-3-270m"),
        ("/models/mine/", "mine"),
        ("x/y.gguf", "y.gguf"),
    ],
)
def test_a_model_is_called_by_its_last_part(model: str, name: str) -> None:
    assert default_model_name(model) == name


def test_rebuild_settings_reach_the_engine() -> None:
    config = engine_config(ServeSettings(disable_rebuild=True, rebuild_depth=3), Path("model"))
    assert (config.enable_rebuild, config.rebuild_depth) == (False, 3)
    exact = engine_config(ServeSettings(), Path("model"))
    assert (exact.enable_rebuild, exact.rebuild_depth) == (True, None)
