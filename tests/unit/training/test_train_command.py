"""What `atom train` tells each of several peers on one machine, and what it tells the user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli import train
from atomtrain.cli.main import main
from atomtrain.cli.parsing import parse
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.launcher import PeerCommand

ADDRESS = "mine@/ip4/127.0.0.1/tcp/4001/p2p/x"
THREE = (
    "train",
    "--peers",
    "3",
    "--run",
    "mine",
    "--model",
    "tiny",
    "--data",
    "text.txt",
    "--plain",
)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PeerCommand]:
    """Start no peers, but note them; they leave a last word each and end with 1."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("In the beginning was a text.\n" * 200)
    noted: list[PeerCommand] = []

    def launch(commands: Sequence[PeerCommand], display: Any) -> int:
        noted.extend(commands)
        for number, command in enumerate(commands):
            command.log.parent.mkdir(parents=True)
            told = f"atom: peer {number} has no disk\n" if number else "a warning\n"
            command.log.write_text(f"something\n{told}")
        return 1

    monkeypatch.setattr("atomtrain.training.launcher.launch_peers", launch)
    return noted


def told(command: PeerCommand, address: str | None) -> TrainOptions:
    """Return the options that a peer is started with."""
    argv = command.argv(address)
    assert list(argv[1:4]) == ["-m", "atomtrain.cli.main", "train"]
    return parse(TrainOptions, argv[4:], prog="atom train", about="", examples="")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], "auto"), (["--compile"], True), (["--compile", "auto"], "auto"),
        (["--compile", "on"], True), (["--compile=on"], True), (["--compile=true"], True),
        (["--compile", "OFF"], False), (["--compile=off"], False), (["--compile=false"], False),
        (["--torch-compile"], True), (["--torch-compile=false"], False),
        (["--compile", "--plain"], True),
    ],
)  # fmt: skip
def test_whether_to_compile_reaches_every_peer(given: list[str], meant: bool | str) -> None:
    options = train.options_of(given)
    assert options.compile == meant
    assert train.options_of(train.arguments_of(options)) == options


@pytest.mark.parametrize("given", [["--compile", "RECIPE"], ["RECIPE", "--compile"]])
def test_a_recipe_behind_compile_is_a_recipe(given: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: tiny\ncompile: false\n")
    options = train.options_of([str(recipe) if word == "RECIPE" else word for word in given])
    assert (options.model, options.compile) == ("tiny", True)


def test_what_does_not_say_whether_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--compile=sometimes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--compile takes auto, on, off, true, false, yes, no, not 'sometimes'" in line


def test_only_the_first_peer_listens_where_it_is_told_and_the_others_join_it(
    launched: list[PeerCommand], tmp_path: Path
) -> None:
    more = ("--port", "4001", "--trace", "trace.json", "--threads", "2", "--profile-again")
    main([*THREE, *more, "--metrics", "prometheus:9100"])
    first, *others = [told(command, ADDRESS) for command in launched]
    assert (first.port, first.join, first.profile_again) == (4001, (), True)
    assert first.trace == tmp_path / "trace.json"
    for other in others:
        assert (other.port, other.join) == (0, (ADDRESS,))
        assert (other.trace, other.profile_again) == (None, False)
    every = [first, *others]
    assert [one.name for one in every] == ["peer-0", "peer-1", "peer-2"]
    assert [one.metrics[0].rpartition(":")[2] for one in every] == ["9100", "9101", "9102"]
    for one, command in zip(every, launched, strict=True):
        assert (one.run, one.model, one.n_peers, one.threads) == ("mine", "tiny", 1, 2)
        assert one.plain
        assert one.host == "0.0.0.0"
        assert command.log.parent == command.events.parent == Path("runs") / "mine" / one.name


def test_threads_are_divided_and_what_the_first_one_complained_of_is_told(
    launched: list[PeerCommand], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "allowed_cores", lambda: range(7))
    assert main(THREE) == 1
    assert {told(command, None).threads for command in launched} == {2}
    assert capsys.readouterr().err == "atom: peer 1 has no disk\n"


def test_the_others_leave_to_the_run_what_the_first_one_makes_of_the_data(
    launched: list[PeerCommand],
) -> None:
    main([*THREE, "--epochs", "2", "--warmup-ratio", "0.1"])
    first, *others = [told(command, ADDRESS) for command in launched]
    assert (first.epochs, first.warmup_ratio) == (2.0, 0.1)
    assert {(other.epochs, other.warmup_ratio) for other in others} == {(None, None)}
