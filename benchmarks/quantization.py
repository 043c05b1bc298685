"""Measures what int8 weights cost in quality, beside bfloat16 and float32.

    .venv/bin/python benchmarks/quantization.py [--models demo demo-chat] [--threads 1] [--save]

The text is this repository's own documentation, cut into pieces (each begins as the tokenizer begins a text).
Every form of a model sees the same pieces:

* prefill: a piece at once; weights are rounded, activations are not;
* decode: all pieces row by row, as decode steps compute: int8 rounds activations, too;
* greedy: 20 pieces' first 32 tokens continued by 64, each form on its own.

Perplexity is exp of the mean negative log-likelihood (float32 log-softmax). Agreement: rows in which the
most likely token is the reference's. KL: mean divergence from float32's distribution, in nats. Forms whose
name begins with `rounded` are made in torch by rounding the checkpoint, and computed in bfloat16: they show
why the format is what it is, and nothing serves them. --save writes
benchmarks/results/quantization.{json,md}, beside the rows of other models that this machine has measured.
Beside other load one thread is much quicker than two.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from machine import machine_line
from quantization_models import Form, Rounding, Texts

from forkpoint.model.device import set_num_threads
from forkpoint.model.load import Model
from forkpoint.model.resolve import default_cache_dir, resolve_model
from forkpoint.server.text import Tokenizer

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PROMPT_TOKENS, GREEDY_TOKENS, NUM_PROMPTS = 32, 64, 20

FLOAT32 = Form("float32", "float32")
BFLOAT16 = Form("bfloat16", "bfloat16")
INT8 = Form("int8", "bfloat16", "int8")
SERVED = (FLOAT32, BFLOAT16, INT8)
MEASURED_ONLY = (
    Form("rounded: 8 bits, one scale a row", "bfloat16", rounding=Rounding(8, None)),
    Form("rounded: 4 bits, groups of 32", "bfloat16", rounding=Rounding(4, 32)),
    Form("rounded: 4 bits, groups of 32, body only", "bfloat16", rounding=Rounding(4, 32, body_only=True)),
)


@dataclass
class Quality:
    """Sums over the rows that were compared; mutable."""

    num_rows: int = 0
    nll: float = 0.0
    divergence: float = 0.0
    agreements: dict[str, int] = field(default_factory=dict)

    def add(
        self, logprobs: torch.Tensor, targets: torch.Tensor, references: Mapping[str, torch.Tensor]
    ) -> None:
        """Rows [N, V] with the tokens that follow them, [N]; references: log-softmax of other forms."""
        self.num_rows += len(targets)
        self.nll -= float(logprobs.gather(1, targets[:, None]).double().sum())
        exact = references[FLOAT32.name]
        self.divergence += float((exact.exp() * (exact - logprobs)).sum(dim=-1).double().sum())
        likeliest = logprobs.argmax(dim=-1)
        for name, reference in references.items():
            same = int((likeliest == reference.argmax(dim=-1)).sum())
            self.agreements[name] = self.agreements.get(name, 0) + same

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_rows)

    def agreement(self, name: str) -> float:
        """Share of rows."""
        return self.agreements[name] / self.num_rows


@dataclass(frozen=True, slots=True)
class Greedy:
    """Continuations against a reference's: how many are equal, and tokens before the first difference."""

    reference: str
    num_equal: int
    mean_equal_tokens: float


@dataclass(frozen=True, slots=True)
class Row:
    """One form of one model."""

    model: str
    form: str
    weight_bytes: int
    prefill: Quality
    decode: Quality | None = None
    greedy: Sequence[Greedy] = ()


def measure(name: str, num_pieces: int, piece_tokens: int) -> list[Row]:
    """All forms of a model. They are held at once, so that rows are compared without storing them."""
    model_dir = resolve_model(name, cache_dir=default_cache_dir(dict(os.environ)), notice=print)
    pieces = text_pieces(Tokenizer.load(model_dir), num_pieces, piece_tokens)
    models = {form.name: form.load(model_dir) for form in (*SERVED, *MEASURED_ONLY)}
    tell(f"{name}: {len(models)} forms are loaded")
    prefill = measure_prefill(models, pieces)
    tell(f"{name}: prefill is measured")
    served = {form.name: models[form.name] for form in SERVED}
    decode = measure_decode(served, pieces)
    tell(f"{name}: decode is measured")
    prompts = [piece[:PROMPT_TOKENS] for piece in pieces[:NUM_PROMPTS]]
    texts = {form: continuations(model, prompts) for form, model in served.items()}
    return [
        Row(
            model=name,
            form=form,
            # Rounded forms take what their floats do: they are not held as whole numbers.
            weight_bytes=model.weight_bytes,
            prefill=prefill[form],
            decode=decode.get(form),
            greedy=[compared(texts[form], other, texts[other]) for other in references(form)]
            if form in texts
            else [],
        )
        for form, model in models.items()
    ]


def tell(progress: str) -> None:
    """On stderr: the whole takes minutes."""
    print(f"{datetime.datetime.now():%H:%M:%S} {progress}", file=sys.stderr, flush=True)


def references(form: str) -> list[str]:
    """What a form is compared with: float32 with nothing, bfloat16 with float32, all others with both."""
    names = [FLOAT32.name, BFLOAT16.name]
    return names[: names.index(form)] if form in names else names


def text_pieces(tokenizer: Tokenizer, num_pieces: int, piece_tokens: int) -> list[list[int]]:
    """The documentation's beginning in pieces of piece_tokens tokens."""
    paths = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    begin = [int(token) for token in tokenizer.encode("")]
    tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    step = piece_tokens - len(begin)
    assert len(tokens) >= num_pieces * step, "the documentation is too short for so many pieces"
    return [begin + tokens[i * step : (i + 1) * step] for i in range(num_pieces)]


def measure_prefill(models: Mapping[str, Model], pieces: Sequence[Sequence[int]]) -> dict[str, Quality]:
    found = {form: Quality() for form in models}
    worlds = {
        form: Texts(model, num_sequences=len(pieces), length=len(pieces[0])) for form, model in models.items()
    }
    for number, piece in enumerate(pieces):
        targets = torch.tensor(piece[1:])
        compared_with: dict[str, torch.Tensor] = {}
        for form, world in worlds.items():
            logprobs = world.logits({number: piece})[:-1]
            if form in (FLOAT32.name, BFLOAT16.name):
                compared_with[form] = logprobs
            found[form].add(logprobs, targets, compared_with)
    return found


def measure_decode(models: Mapping[str, Model], pieces: Sequence[Sequence[int]]) -> dict[str, Quality]:
    found = {form: Quality() for form in models}
    worlds = {
        form: Texts(model, num_sequences=len(pieces), length=len(pieces[0])) for form, model in models.items()
    }
    for position in range(len(pieces[0]) - 1):
        targets = torch.tensor([piece[position + 1] for piece in pieces])
        step = {number: [piece[position]] for number, piece in enumerate(pieces)}
        compared_with: dict[str, torch.Tensor] = {}
        for form, world in worlds.items():
            compared_with[form] = logprobs = world.logits(step)
            found[form].add(logprobs, targets, compared_with)
    return found


def continuations(model: Model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """GREEDY_TOKENS of each prompt, all in one batch; ends of text are tokens like others."""
    world = Texts(model, num_sequences=len(prompts), length=PROMPT_TOKENS + GREEDY_TOKENS)
    tokens = [[int(world.logits({number: prompt})[-1].argmax())] for number, prompt in enumerate(prompts)]
    for _ in range(GREEDY_TOKENS - 1):
        chosen = world.logits({number: [found[-1]] for number, found in enumerate(tokens)}).argmax(dim=-1)
        for found, token in zip(tokens, chosen.tolist(), strict=True):
            found.append(token)
    return tokens


def compared(texts: Sequence[Sequence[int]], name: str, others: Sequence[Sequence[int]]) -> Greedy:
    """How far `texts` are those of the form `name`."""
    equal = [
        next((i for i, (one, two) in enumerate(zip(text, other, strict=True)) if one != two), len(text))
        for text, other in zip(texts, others, strict=True)
    ]
    return Greedy(name, equal.count(GREEDY_TOKENS), sum(equal) / len(equal))


def as_markdown(rows: Sequence[Row]) -> str:
    lines = [
        "# Quality of int8 weights",
        "",
        f"`benchmarks/quantization.py`, which says what the columns are. {machine_line()}.",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        lines += [
            "",
            f"## {model}",
            "",
            f"{own[0].prefill.num_rows:,} tokens. Prefill (weights alone are rounded):",
        ]
        lines += [
            "",
            "| form | perplexity | agrees with float32 | with bfloat16 | KL |",
            "|:--|--:|--:|--:|--:|",
        ]
        lines += [f"| {row.form} | {_quality(row.form, row.prefill)} |" for row in own]
        lines += ["", "Decode, row by row (activations, too):", ""]
        lines += ["| form | weights | perplexity | agrees with float32 | with bfloat16 | KL |"]
        lines += ["|:--|--:|--:|--:|--:|--:|"]
        lines += [
            f"| {row.form} | {row.weight_bytes / 1e6:.0f} MB | {_quality(row.form, row.decode)} |"
            for row in own
            if row.decode is not None
        ]
        lines += ["", f"Greedy, {NUM_PROMPTS} prompts, {GREEDY_TOKENS} tokens each:", ""]
        lines += ["| form | against | equal to the end | tokens before the first difference, mean |"]
        lines += ["|:--|:--|--:|--:|"]
        lines += [
            f"| {row.form} | {greedy.reference} | {greedy.num_equal} | {greedy.mean_equal_tokens:.1f} |"
            for row in own
            for greedy in row.greedy
        ]
    return "\n".join(lines) + "\n"


def _quality(form: str, quality: Quality) -> str:
    agreements = [
        f"{quality.agreement(name):.2%}" if name in references(form) else "-"
        for name in (FLOAT32.name, BFLOAT16.name)
    ]
    return " | ".join(
        [f"{quality.perplexity:.3f}", *agreements, f"{quality.divergence / quality.num_rows:.5f}"]
    )


def save(rows: Sequence[Row]) -> None:
    """Write the rows; those of other models stay if this machine has measured them today."""
    path = RESULTS / "quantization.json"
    measured = {row.model for row in rows}
    rows = [row for row in _saved_rows(path) if row.model not in measured] + list(rows)
    (RESULTS / "quantization.md").write_text(as_markdown(rows), encoding="utf-8")
    record = {"machine": machine_line(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _saved_rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["machine"] != machine_line():
        return []
    return [
        Row(
            model=row["model"],
            form=row["form"],
            weight_bytes=row["weight_bytes"],
            prefill=Quality(**row["prefill"]),
            decode=None if row["decode"] is None else Quality(**row["decode"]),
            greedy=[Greedy(**greedy) for greedy in row["greedy"]],
        )
        for row in record["rows"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "demo-chat"])
    parser.add_argument("--pieces", type=int, default=24, help=f"of text, {NUM_PROMPTS} or more")
    parser.add_argument("--piece-tokens", type=int, default=128, help=f"more than {PROMPT_TOKENS}")
    parser.add_argument("--threads", type=int, help="default: as the server chooses")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.pieces < NUM_PROMPTS:
        parser.error(f"--pieces {arguments.pieces}: {NUM_PROMPTS} are continued")
    if arguments.piece_tokens <= PROMPT_TOKENS:
        parser.error(f"--piece-tokens {arguments.piece_tokens}: the first {PROMPT_TOKENS} are a prompt")
    set_num_threads(arguments.threads)
    rows = [
        row for name in arguments.models for row in measure(name, arguments.pieces, arguments.piece_tokens)
    ]
    print(as_markdown(rows))
    if arguments.save:
        save(rows)


if __name__ == "__main__":
    main()
