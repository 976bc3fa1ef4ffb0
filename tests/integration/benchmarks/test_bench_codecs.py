"""Benchmark `codecs`: both paths are timed for every format, and the table says which is used."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from atombench.common import BenchmarkOptions
from atombench.swarm import codecs
from atombench.swarm.codecs import CodecSetup
from atomtrain.cli.main import main
from atomtrain.native import library
from atomtrain.swarm.codecs.dense import BlockCodec

TINY = CodecSetup(elements=5000, rounds=2)
ROWS = {"float16", "int8", "int4", "topk", "mean-int8", "mean-topk"}


def test_both_paths_have_a_rate_for_every_format() -> None:
    result = codecs.run(BenchmarkOptions(), TINY)
    assert result["path"] == "compiled"
    for prefix in ("", "torch_"):
        for way in ("encode", "decode"):
            rates = result[f"{prefix}{way}_elements_per_s"]
            assert set(rates) == ROWS
            assert min(rates.values()) > 0
    assert result["inputs"]["elements"] == 5000
    assert {"machine", "versions"} <= set(result)


def test_the_rows_of_pytorch_call_nothing_compiled() -> None:
    """Each way is tried once, and then timed twice, on either path."""
    ways = Counter[tuple[str, bool]]()
    plain = BlockCodec.decode

    def watched(codec: BlockCodec, *given: Any) -> None:
        ways[codec.name, library.core() is None] += 1
        plain(codec, *given)

    with patch.object(BlockCodec, "decode", watched):
        codecs.run(BenchmarkOptions(), TINY)
    assert ways["int4", True] > ways["int4", False] >= 3, "what it sent, PyTorch has to decode"


def test_without_a_library_the_only_path_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "core", lambda: None)
    result = codecs.run(BenchmarkOptions(), TINY)
    assert result["path"] == "torch"
    assert set(result["encode_elements_per_s"]) == ROWS
    assert "torch_encode_elements_per_s" not in result


def test_the_command_prints_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codecs, "QUICK", TINY)
    assert main(["bench", "codecs", "--quick"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {line[0]: line[-1] for line in lines if line}
    assert found["path"] == "compiled"
    assert found["encode_elements_per_s.int4"].endswith("/s")
