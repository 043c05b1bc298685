"""The command line: the composition root, and the only place that reads the environment.

Anything heavy (torch, transformers, fastapi) is imported inside the command that needs it, so that --help and
show-config answer at once.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from forkpoint.configs.bench_settings import BenchSettings
from forkpoint.configs.chat_settings import ChatSettings
from forkpoint.configs.errors import (
    ConfigError,
    EngineDied,
    ForkpointError,
    ModelLoadError,
    RemoteError,
)
from forkpoint.configs.measure_settings import MeasureSettings
from forkpoint.configs.settings import MODEL, OPERATION, ServeSettings
from forkpoint.configs.simulate_settings import SimulateSettings
from forkpoint.configs.top_settings import TopSettings
from forkpoint.server.cli_layers import Layers

# What a person can put right ends with this status, like a usage error of any command.
USAGE_ERROR = 2
FAILURE = 1

Model = Annotated[
    str,
    Parameter(
        group=MODEL,
        help="demo, demo-chat, a directory with config.json and safetensors, a .gguf file, or a hub id: "
        "org/name or org/name@revision.",
    ),
]
ConfigFiles = Annotated[
    tuple[str, ...],
    Parameter(
        name="--config",
        negative="",
        show_default=False,
        group=OPERATION,
        help="YAML file of `flag: value` lines, or a preset's name; repeatable, later ones win.",
    ),
]
Settings = Annotated[ServeSettings, Parameter(name="*")]
DEFAULTS = ServeSettings()
Chat = Annotated[ChatSettings, Parameter(name="*")]
CHAT_DEFAULTS = ChatSettings()
Bench = Annotated[BenchSettings, Parameter(name="*")]
BENCH_DEFAULTS = BenchSettings()
Measurement = Annotated[MeasureSettings, Parameter(name="*")]
MEASUREMENT_DEFAULTS = MeasureSettings()
Simulation = Annotated[SimulateSettings, Parameter(name="*")]
SIMULATION_DEFAULTS = SimulateSettings()
Top = Annotated[TopSettings, Parameter(name="*")]
TOP_DEFAULTS = TopSettings()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status. arguments: those of the process if None."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; an error becomes one line and a hint, never a traceback."""
    try:
        status = build_app()(arguments, result_action="return_value", exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _complain(" ".join(str(error).split()), None)
        return USAGE_ERROR
    except (ConfigError, ModelLoadError) as error:
        _complain(str(error), error.hint)
        return USAGE_ERROR
    except EngineDied as error:
        _complain(str(error), "if memory ran out, lower --kv-cache-memory-bytes or --max-total-tokens")
        return FAILURE
    except RemoteError as error:
        _complain(str(error), error.hint)
        return FAILURE
    except ForkpointError as error:
        _complain(str(error), None)
        return FAILURE
    except MemoryError:
        _complain("out of memory", "make the pools smaller: --max-total-tokens, --max-running-requests")
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    return status if isinstance(status, int) else 0


def build_app() -> App:
    """The commands. Their settings come from the layers of forkpoint.server.cli_layers."""
    layers = Layers()
    app = App(
        name="forkpoint",
        help="OpenAI-compatible inference server for hybrid-attention language models.",
        version=importlib.metadata.version("forkpoint"),
        config=layers.in_order,
        help_format="plaintext",
    )

    @app.command
    def serve(model: Model = "demo", /, *, config: ConfigFiles = (), settings: Settings = DEFAULTS) -> int:
        """Serve MODEL over HTTP until SIGTERM or Ctrl-C.

        Every setting may also come from the environment (--page-size:
        FORKPOINT_PAGE_SIZE) or from a --config file (page-size: 4). The command
        line wins over the environment, that over files, those over the default.
        """
        from forkpoint.server.cli_serve import serve_model

        return serve_model(model, settings)

    @app.command
    def chat(*, settings: Chat = CHAT_DEFAULTS) -> int:
        """Talk to a running server in the terminal: Forkpoint's, or any that is OpenAI-compatible.

        Below each answer stands how much of its prompt came from the server's cache, and how fast it was.
        Input that is no terminal is read line by line, each a message; answers alone go to standard output.
        Settings also come from the environment (--max-tokens: FORKPOINT_MAX_TOKENS).
        """
        from forkpoint.server.cli_chat import chat_with_server

        return chat_with_server(settings)

    @app.command
    def top(*, settings: Top = TOP_DEFAULTS) -> int:
        """Watch a running Forkpoint server in the terminal: speed, reuse, pools, requests.

        Without a terminal, one picture is printed.
        """
        from forkpoint.server.cli_top import show_top

        return show_top(settings)

    @app.command
    def bench(*, settings: Bench = BENCH_DEFAULTS) -> int:
        """Load-test a running server: Forkpoint's, or any that is OpenAI-compatible.

        Prints throughput, latencies and the hit rate of the server's prefix cache; --json and --plot keep
        them. Without --request-rate, --concurrency requests are under way all the time.
        """
        from forkpoint.server.cli_bench import run_bench

        return run_bench(settings)

    @app.command
    def simulate(*, settings: Simulation = SIMULATION_DEFAULTS) -> int:
        """Replay requests through the scheduler and the prefix cache without a model.

        Tells what share of the prompts is served from the cache and how much work is left, for the layers,
        window and pool sizes of any model. Give --trace or --workload.
        """
        from forkpoint.server.cli_simulate import print_simulation

        return print_simulation(settings)

    @app.command
    def measure_rebuild(model: Model = "demo", /, *, settings: Measurement = MEASUREMENT_DEFAULTS) -> int:
        """Measure on MODEL how far `serve --rebuild-depth K` is from exact, and how much time it saves.

        Runs a prompt cold, then over a full hit whose windows are gone, once for each depth.
        """
        from forkpoint.server.cli_measure import measure

        return measure(model, settings)

    @app.command
    def show_config(
        model: Model = "demo",
        /,
        *,
        config: ConfigFiles = (),
        settings: Settings = DEFAULTS,
    ) -> int:
        """Show what `serve` with the same arguments would use, and where each value comes from."""
        from forkpoint.server.cli_report import print_settings

        return print_settings(model, settings, layers.origins)

    @app.command
    def check_env() -> int:
        """Show versions, device and memory; what works and what is missing. Status 1 if something is."""
        from forkpoint.server.cli_report import print_environment

        return print_environment()

    return app


def _complain(message: str, hint: str | None) -> None:
    print(f"forkpoint: error: {message}", file=sys.stderr)
    if hint is not None:
        print(f"hint: {hint}", file=sys.stderr)
