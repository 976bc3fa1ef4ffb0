"""A model's folder from a stranger ends in one line, soon and small: configuration and texts."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile_runs import refused, told
from tests.support.mutators import Change, cut, damage, edit, nested, put

pytest.importorskip("transformers")
CONFIG = "config.json"
SETTINGS = "tokenizer_config.json"
TRAIN = [
    "--host", "127.0.0.1", "--device", "cpu", "--context", "16", "--sequences", "2", "--steps", "1",
    "--plain", "--no-profile", "--threads", "1",
]  # fmt: skip


def link(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def pipe(name: str) -> Change:
    """Put a pipe in a file's place: who reads it waits for ever."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def large(name: str, begin: str, size_bytes: int = 3 << 30) -> Change:
    """Make a file that is much larger than it takes on the disk."""

    def change(folder: Path) -> None:
        (folder / name).write_text(begin)
        os.truncate(folder / name, size_bytes)

    return change


ROPE = {"rope_type": "spiral", "rope_theta": 10000.0}
CONFIGS: dict[str, Change] = {
    "empty": put(CONFIG, ""),
    "no json": put(CONFIG, "model_type: llama"),
    "a list": put(CONFIG, "[1, 2]"),
    "a number": put(CONFIG, "1e999"),
    "utf-16": put(CONFIG, "{}".encode("utf-16")),
    "cut": cut(CONFIG, 0.7),
    "damaged 1": damage(CONFIG, 1),
    "damaged 2": damage(CONFIG, 2),
    "nested objects": put(CONFIG, nested(100_000)),
    "nested lists": put(CONFIG, nested(100_000, lists=True)),
    "nested a little": edit(CONFIG, text_config=json.loads(nested(40))),
    "nested lists within": edit(CONFIG, layer_types=json.loads(nested(40, lists=True))),
    "a digit without end": put(CONFIG, '{"vocab_size": ' + "9" * 100_000 + "}"),
    "larger than memory": large(CONFIG, "{}"),
    "a pipe": pipe(CONFIG),
    "a device": link(CONFIG, "/dev/zero"),
    "elsewhere": link(CONFIG, "../elsewhere.json"),
    "vocabulary of -1": edit(CONFIG, vocab_size=-1),
    "vocabulary of 10^18": edit(CONFIG, vocab_size=10**18),
    "vocabulary as text": edit(CONFIG, vocab_size="300"),
    "no vocabulary": edit(CONFIG, vocab_size=None),
    "10^7 layers": edit(CONFIG, num_hidden_layers=10**7),
    "4096 layers": edit(CONFIG, num_hidden_layers=4096),
    "layers as text": edit(CONFIG, num_hidden_layers="3"),
    "3.5 layers": edit(CONFIG, num_hidden_layers=3.5),
    "width 0": edit(CONFIG, hidden_size=0),
    "width 2^31": edit(CONFIG, hidden_size=2**31),
    "no heads": edit(CONFIG, num_attention_heads=0),
    "more key heads than heads": edit(CONFIG, num_key_value_heads=7),
    "head width 2^31": edit(CONFIG, head_dim=2**31),
    "unknown rope": edit(CONFIG, rope_parameters=ROPE, rope_scaling=ROPE),
    "rope as text": edit(CONFIG, rope_parameters="yarn", rope_scaling="yarn"),
    "unknown activation": edit(CONFIG, hidden_act="evil"),
    "unknown kind": edit(CONFIG, model_type="evil"),
    "kind as a list": edit(CONFIG, model_type=["llama"]),
    "another kind": edit(CONFIG, model_type="mixtral"),
    "10^6 experts": edit(CONFIG, model_type="jamba", num_experts=10**6, num_hidden_layers=4096),
    "experts without end": edit(
        CONFIG, model_type="phimoe", num_local_experts=10**9, num_hidden_layers=4
    ),
    "layer types without end": edit(CONFIG, layer_types=["full_attention"] * 10**6),
    "positions without end": edit(CONFIG, model_type="gptj", n_positions=2**31, n_embd=64),
    "padding beyond": edit(CONFIG, pad_token_id=10**9),
    "epsilon as text": edit(CONFIG, rms_norm_eps="1e-6"),
}
TEXTS: dict[str, Change] = {
    "settings nested": put(SETTINGS, nested(100_000)),
    "settings a list": put(SETTINGS, "[]"),
    "settings larger than memory": large(SETTINGS, "{}"),
    "settings a pipe": pipe(SETTINGS),
    "settings elsewhere": link(SETTINGS, "/etc/hostname"),
    "end of text a number": put(SETTINGS, '{"eos_token": 7}'),
    "end of text unknown": put(SETTINGS, '{"eos_token": "<|nowhere|>"}'),
    "template elsewhere": link("chat_template.jinja", "/etc/hostname"),
    "template larger than memory": large("chat_template.jinja", "{{ 1 }}"),
    "template not text": put("chat_template.jinja", b"\xff\xfe\x00\xd8"),
}


def changed(honest: Path, place: Path, change: Change) -> Path:
    """Return a copy of the honest folder with a change."""
    folder = place / "model"
    shutil.copytree(honest, folder)
    change(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS | TEXTS)
def test_a_folder_is_refused(name: str, honest: Path, text: Path, tmp_path: Path) -> None:
    folder = changed(honest, tmp_path, (CONFIGS | TEXTS)[name])
    refused(tmp_path, "generate", str(folder), "--tokens", "1")
    refused(tmp_path, "train", "--model", str(folder), "--data", str(text), *TRAIN)


TEMPLATES = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless output": "{% for a in range(99999) %}{% for b in range(99999) %}x"
    "{% endfor %}{% endfor %}",
    "a large text": "{{ 'a' * 20000000000 }}",
    "a wide text": "{{ '%20000000000d' % 1 }}",
    "doubled": "{% set n = namespace(x='a' * 99) %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branches": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "nested": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "no template": "{% if %}",
    "unknown filter": "{{ messages | evil }}",
    "a file": "{% include '/etc/passwd' %}",
    "code": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "raises": "{{ raise_exception('" + "no " * 100_000 + "') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_refused(name: str, honest: Path, tmp_path: Path) -> None:
    folder = changed(honest, tmp_path, put("chat_template.jinja", TEMPLATES[name]))
    row: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    refused(tmp_path, "data", "inspect", str(tmp_path / "rows.jsonl"), "--model", str(folder))


def test_the_honest_folder_is_taken(honest: Path, text: Path, tmp_path: Path) -> None:
    """What the other tests refuse is due to what they change."""
    found = told(tmp_path, "generate", str(honest), "--tokens", "1")
    assert (found.code, found.mark) == (0, "")
    assert re.fullmatch(r"1 token, [\d.]+ tokens/s, resident on cpu, \w+\n", found.errors)
    data = ["data", "inspect", str(text), "--model", str(honest)]
    assert told(tmp_path, *data).code == 0


def test_what_watches_would_tell(tmp_path: Path) -> None:
    """A hub is asked for a model by name, and is seen to be."""
    found = told(tmp_path, "data", "inspect", "x.txt", "--model", "org/name")
    assert "looked_up ('huggingface.co',)" in found.mark
