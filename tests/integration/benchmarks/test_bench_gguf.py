"""`atom bench gguf` with a tiny model; llama.cpp is not of the development's packages."""

from __future__ import annotations

import importlib.util

import pytest

from atombench.common import BenchmarkOptions
from atombench.engine import gguf
from atomtrain.errors import ConfigError


def test_llama_cpp_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        gguf.run(BenchmarkOptions(quick=True))


def test_llama_cpp_computes_what_transformers_does() -> None:
    pytest.importorskip("llama_cpp")
    result = gguf.run(BenchmarkOptions(quick=True))
    for kind, most in (("f16", 1e-6), ("q8_0", 1e-4)):
        found = result[kind]
        assert found["same_tokens"]
        assert found["same_text"]
        assert 0 <= found["mean_kl_nats"] < most
        assert found["same_top_share"] == 1
