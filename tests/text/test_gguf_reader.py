"""The quick GGUF reader gives what the library gives: every kind of field, either byte order, any cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from forkpoint.model.gguf_reader import QuickGgufReader

FIELDS: dict[str, Any] = {
    "a.words": ["", "a", "日本語", "x" * 300, "🦊"],
    "a.floats": [0.5, -1.0, 3.0],
    "a.ints": [1, -2, 3],
    "a.flags": [True, False],
    "a.one": ["alone"],
    "a.name": "some text",
    "a.number": 77,
}


@pytest.fixture(params=[gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / "fields.gguf"
    writer = gguf.GGUFWriter(file, "llama", endianess=request.param)
    for name, value in FIELDS.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def contents(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def test_fields_are_those_of_the_library(path: Path) -> None:
    quick, plain = QuickGgufReader(path), gguf.GGUFReader(path)
    assert contents(quick) == contents(plain)
    assert contents(quick).items() >= FIELDS.items()
    assert [field.types for field in quick.fields.values()] == [
        field.types for field in plain.fields.values()
    ]
    words = quick.fields["a.words"]
    assert (words.contents(2), words.contents(slice(1, 3))) == ("日本語", ["a", "日本語"])


def test_a_cut_file_is_refused_wherever_it_is_cut(path: Path) -> None:
    whole = path.read_bytes()
    for end in range(24, len(whole), 5):
        path.write_bytes(whole[:end])
        with pytest.raises((ValueError, IndexError, KeyError, OverflowError)):
            reader = QuickGgufReader(path)
            contents(reader)
            if end >= reader.data_offset - reader.alignment:
                raise ValueError("all of its fields are there")


def test_an_array_that_claims_to_be_endless_is_refused_at_once(path: Path) -> None:
    content = bytearray(path.read_bytes())
    begin = content.index(b"a.words") + len(b"a.words") + 4 + 4
    content[begin : begin + 8] = b"\x00\xff\xff\xff\xff\xff\xff\x00"
    path.write_bytes(bytes(content))
    with pytest.raises((ValueError, OverflowError)):
        QuickGgufReader(path)
