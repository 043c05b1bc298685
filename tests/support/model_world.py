"""The real engine on a real tiny model with a tokenizer: requests with every option, alone or together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.model.outputs import TokenLogprobs
from forkpoint.scheduler.build import build_engine
from forkpoint.scheduler.messages import Abort, Finish, FlushCache, FlushDone, Submit


@dataclass
class Answer:
    """What one sequence got so far; mutable, filled by ModelWorld."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score_pieces: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = -1
    finish: Finish | None = None

    @property
    def scores(self) -> TokenLogprobs:
        return TokenLogprobs.join(self.score_pieces)

    @property
    def reason(self) -> str | None:
        return None if self.finish is None else self.finish.reason


class ModelWorld:
    """One engine in float32 on the CPU, stepped by hand."""

    def __init__(self, model_dir: Path, *, chunk: int = 64, full_tokens: int = 4096) -> None:
        config = EngineConfig(
            model_dir,
            device="cpu",
            dtype="float32",
            page_size=4,
            max_running_requests=16,
            chunked_prefill_size=chunk,
            full_tokens=full_tokens,
            swa_tokens=4096,
        )
        self.engine = build_engine(config, lambda progress: None)
        self.answers: dict[int, Answer] = {}

    def submit(self, prompt: list[int], params: SamplingParams, *, choice: int = 0) -> Answer:
        uid = len(self.answers)
        answer = self.answers[uid] = Answer()
        self.engine.handle(Submit(uid, np.array(prompt, dtype=np.int32), params, choice))
        return answer

    def abort(self, answer: Answer) -> None:
        uid = next(uid for uid, other in self.answers.items() if other is answer)
        self.engine.handle(Abort(uid))

    def answer(self, prompt: list[int], params: SamplingParams, *, choice: int = 0) -> Answer:
        """The whole answer of one more request; whatever waits runs beside it."""
        answer = self.submit(prompt, params, choice=choice)
        self.run()
        return answer

    def step(self) -> None:
        report = self.engine.step()
        for start in report.started:
            self.answers[start.uid].cached_tokens = start.cached_tokens
        for scores in report.prompt_scores:
            self.answers[scores.uid].score_pieces.append(scores.logprobs)
        for uid, token in zip(report.uids, report.tokens, strict=True):
            self.answers[uid].tokens.append(token)
            if uid in report.logprobs:
                self.answers[uid].logprobs.append(report.logprobs[uid])
        for finish in report.finished:
            assert self.answers[finish.uid].finish is None
            self.answers[finish.uid].finish = finish

    def run(self, *, max_steps: int = 5_000) -> None:
        """Step until all have ended."""
        for _ in range(max_steps):
            self.step()
            if not self.engine.has_work:
                self.step()
                assert all(answer.finish is not None for answer in self.answers.values())
                return
        raise AssertionError(f"still at work after {max_steps} steps")

    def flush(self) -> None:
        done = self.engine.handle(FlushCache(0))
        assert isinstance(done, FlushDone) and done.cleared
