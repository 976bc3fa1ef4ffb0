"""Mistakes told early: without torch, by the same names, and nothing right is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from atombench.mistakes import MISTAKES, make
from atomtrain.errors import AtomError
from atomtrain.planning.catalogue import GPUS
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.codecs.names import CODEC_NAMES
from atomtrain.training.config import preflight as early
from atomtrain.training.config.options import TrainOptions
from tests.support.waiting import PATIENCE_S

PEER = "12D3KooWJCGm3rTQcJcNZEtzqgqBRGP9Nm5aTDuHkrKyQu1RRpqQ"


def test_the_lists_are_those_of_their_owners() -> None:
    assert [codec_named(name).name for name in CODEC_NAMES] == list(CODEC_NAMES)
    for name in GPUS:
        early.check_gpu_name(name)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, tempfile, atomtrain.cli.train as train;"
        "from atomtrain.training.config.preflight import check_early;"
        "check_early(train.options_of(['pretrain-small', '--data', sys.argv[1], '--wire', 'int4',"
        "'--optimizer', 'muon', '--schedule', 'linear', '--precision', 'bf16', '--outer', 'mean',"
        "'--gradient-dtype', 'float32', '--group-size', '8', '--clip-norm', '0']));"
        "print(sorted({'torch', 'numpy', 'hivemind', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, __file__], capture_output=True, text=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


RIGHT = TrainOptions(model="tiny", data=(__file__,))


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"model": "org/name"}, {"model": "folder/config.json"}, {"device": "cuda:1"},
        {"device": "emulated:1GiB/s"}, {"join": ("lan",)},
        {"join": (f"a@/dns4/host/tcp/1/p2p/{PEER}",)},
        {"run": "new"}, {"dropout": 0.0}, {"micro_batch": 2, "sequences": 8}, {"data": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_may_be_right_is_let_through(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atomtrain.models.hub_reach.out_of_reach", lambda: "")
    early.check_early(dataclasses.replace(RIGHT, **fields))  # type: ignore[arg-type]


def test_a_folder_of_runs_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(AtomError, match="is a file"):
        early.check_early(dataclasses.replace(RIGHT, directory=file / "below"))


def test_gradients_are_of_16_bits_without_being_asked_for() -> None:
    with pytest.raises(AtomError, match=r"takes float32, not 'bf16'\. Leave it out"):
        early.check_early(dataclasses.replace(RIGHT, precision="bf16", gradient_dtype="bf16"))


@pytest.mark.parametrize("mistake", MISTAKES[::6], ids=lambda mistake: " ".join(mistake.arguments))
def test_the_command_answers_politely(mistake: object) -> None:
    answer = make(mistake)  # type: ignore[arg-type]
    assert answer.is_polite(mistake), answer  # type: ignore[arg-type]


def test_the_hardware_file_is_where_it_is_looked_for() -> None:
    import atomtrain

    file = Path(atomtrain.__file__).parent / "planning" / "hardware.json"
    assert len(json.loads(file.read_text())["gpus"]) == len(GPUS)


def test_runs_that_begin_in_one_second_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "1129-211528")
    for expected in ("tiny-1129-211528", "tiny-1129-211528-2", "tiny-1129-211528-3"):
        assert early.unnamed_run("tiny", tmp_path) == expected
        (tmp_path / expected).mkdir()
