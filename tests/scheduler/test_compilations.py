"""When the compiler of grammars is loaded: never for a start, once, in a thread, and failing closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import get_context
from pathlib import Path

import pytest
from support.engine_world import EngineWorld
from support.model_world import ModelWorld
from support.tiny_models import one_character_per_token, save_tiny_model

from forkpoint.cache import CacheGeometry
from forkpoint.configs.errors import ModelLoadError, RequestError
from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler.constraint import Compilations
from forkpoint.scheduler.engine import Engine
from forkpoint.scheduler.engine_process import serve_pipe
from forkpoint.scheduler.grammar import GrammarCompiler
from forkpoint.scheduler.messages import LoadProgress, Ready, Shutdown

PATIENCE_S = 60.0
DIGIT = '{"grammars": [{"lark_grammar": "start: /[0-9]/"}]}'


def tiny_compiler() -> GrammarCompiler:
    return GrammarCompiler(one_character_per_token(), vocab_size=320, eos_token_ids=[1])


class Loading:
    """Loads when it may, and counts how often it was asked."""

    def __init__(self, load: Callable[[], GrammarCompiler] = tiny_compiler) -> None:
        self.may_go_on = threading.Event()
        self.begun = threading.Event()
        self.num_calls = 0
        self._load = load

    def __call__(self) -> GrammarCompiler:
        self.num_calls += 1
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return self._load()


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    loading = Loading()
    Compilations(loading)
    assert loading.num_calls == 0


def test_nobody_waits_for_the_loading_but_the_grammar() -> None:
    loading = Loading()
    compilations = Compilations(loading)
    compilations.prepare()
    constraint = compilations.start(DIGIT)
    assert loading.begun.wait(PATIENCE_S) and not constraint.done()
    loading.may_go_on.set()
    allowed = constraint.result(PATIENCE_S)
    assert not allowed.is_complete


def test_it_is_loaded_once_however_often_it_is_asked_for() -> None:
    loading = Loading()
    loading.may_go_on.set()
    compilations = Compilations(loading)
    futures = [compilations.start(DIGIT) for _ in range(3)]
    compilations.prepare()
    for future in futures:
        future.result(PATIENCE_S)
    assert loading.num_calls == 1


def refuse_to_load() -> GrammarCompiler:
    raise ModelLoadError("no token ends a text")


def test_where_it_cannot_be_loaded_every_grammar_is_refused_with_the_reason() -> None:
    loading = Loading(refuse_to_load)
    loading.may_go_on.set()
    compilations = Compilations(loading)
    for future in [compilations.start(DIGIT), compilations.start(DIGIT)]:
        with pytest.raises(RequestError, match="cannot follow grammars: no token ends a text"):
            future.result(PATIENCE_S)
    assert loading.num_calls == 1


def test_engine_whose_tokenizer_grammars_cannot_read_is_ready_and_refuses_the_grammar_alone(
    tmp_path: Path,
) -> None:
    model_dir = save_tiny_model(tmp_path / "tiny", one_character_per_token())
    (model_dir / "tokenizer.json").write_text("{}", encoding="utf-8")
    world = ModelWorld(model_dir)
    constrained = world.submit([5, 6], SamplingParams(seed=0, max_tokens=4, grammar=DIGIT))
    plain = world.submit([5, 6], SamplingParams(seed=0, max_tokens=4))
    world.run()
    assert constrained.reason == "error" and len(plain.tokens) == 4


def test_idle_engine_loads_after_it_is_ready_and_without_any_request() -> None:
    loading = Loading()
    context = get_context("spawn")
    inbox, to_engine = context.Pipe(duplex=False)
    from_engine, outbox = context.Pipe(duplex=False)

    def build(_: EngineConfig, progress: Callable[[LoadProgress], None]) -> Engine:
        progress(LoadProgress("loading weights", 0, 1))
        geometry = CacheGeometry(4, 16)
        world = EngineWorld(
            geometry, full_pages=50, swa_pages=50, max_rows=64, compilations=Compilations(loading)
        )
        assert not loading.begun.is_set()
        return world.engine

    ended: Future[None] = Future()

    def run() -> None:
        serve_pipe(EngineConfig(model_dir=Path("unused")), inbox, outbox, build)
        ended.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    messages = [from_engine.recv(), from_engine.recv()]
    assert messages[0] == LoadProgress("loading weights", 0, 1)
    assert isinstance(messages[1], Ready)
    assert [name for name, _ in messages[1].stages] == ["imports", "loading weights"]
    assert loading.begun.wait(PATIENCE_S)
    loading.may_go_on.set()
    to_engine.send(Shutdown())
    ended.result(PATIENCE_S)
