"""Recipe files: read by the options' types, overridden, and every mistake told with its line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.cli.init import Ask, Check, Facts, filled
from atomtrain.cli.inputs import schema
from atomtrain.cli.main import main
from atomtrain.cli.train import options_of
from atomtrain.errors import AtomError, ConfigError
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe_files import (
    options_with,
    read_recipe,
    ready_recipes,
    recipe_path,
    recipe_text,
)
from tests.support import ROOT


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(path: Path, **given_beside: object) -> str:
    with pytest.raises(ConfigError) as caught:
        options_with(read_recipe(path), given_beside)
    return str(caught.value)


def test_values_have_the_types_of_their_options(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "model: tiny\nlearning-rate: 6e-4   # YAML itself would take this for a text\nsteps: 7\n"
        "join: [a@/x, b@/y]\nmeasured_rounds: true\ndirectory: no\nseed:\nrun: on\n",
    )
    options = options_with(read_recipe(path), {})
    assert options == TrainOptions(
        model="tiny", learning_rate=6e-4, steps=7, join=("a@/x", "b@/y"), measured_rounds=True,
        directory=Path("no"), run="on",
    )  # fmt: skip


def test_late_updates_are_gone_and_recipes_that_never_asked_for_them_go_on(tmp_path: Path) -> None:
    without = read_recipe(written(tmp_path, "delay-updates: no\nmodel: tiny\n"))
    assert without.values == {"model": "tiny"}
    path = written(tmp_path, "model: tiny\ndelay-updates: true\n")
    with pytest.raises(ConfigError, match=":2: delay-updates: updates are never"):
        read_recipe(path)


def test_the_command_line_counts_more(tmp_path: Path) -> None:
    path = written(tmp_path, "model: tiny\nsteps: 7\nplain: true\nmetrics: prometheus:9100\n")
    options = options_of([str(path), "--steps", "9", "--plain=false"])
    assert (options.model, options.steps, options.plain) == ("tiny", 9, False)
    assert options.metrics == ("prometheus:9100",)
    assert options_of(["--steps", "9", str(path)]).steps == 9


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "modle: tiny\nsteps: ten\n\nplain: perhaps\nsteps: 3\nmodel: {a: 1}\n")
    assert complaint(path) == (
        f"{path} has 5 mistakes: (line 1) there is no key 'modle'. Did you mean 'model'? "
        "(line 2) steps must be a whole number, not 'ten' "
        "(line 4) plain must be true or false, not 'perhaps' "
        "(line 5) steps stands in line 2 already "
        "(line 6) model takes one value, not a mapping"
    )


def test_values_that_cannot_be_are_told_with_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "steps: 0\nmodel: tiny\nport: 70000\nlearning-rate: -1\nresume: yes\n")
    told = complaint(path)
    assert re.findall(r"\((line \d+|beside it)\)", told) == [f"line {n}" for n in (1, 4, 3, 5)]
    assert "(line 1) --steps must be at least 1" in told
    assert "(line 5) --resume needs the name" in told
    assert "has 3 mistakes" in complaint(path, run="m"), "what is beside it completes a recipe"
    path = written(tmp_path, "model: tiny\nport: 70000\n")
    assert complaint(path).startswith(f"{path}:2: --port"), "a single one stands as in a compiler"
    assert "(elsewhere) --steps" in complaint(path, steps=0)
    beside = complaint(written(tmp_path, "model: tiny\n"), steps=0)
    assert beside.startswith("--steps"), "a mistake of the command line has no line"


def test_names_that_do_not_exist_are_told_with_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "wire: int5\nmodel: tiny\nschedule: cosin\noptimizer: adamm\n")
    told = complaint(path)
    for mistake in (
        "(line 4) there is no optimizer 'adamm'. ",
        "(line 3) there is no schedule 'cosin'. ",
        "(line 1) wire format 'int5' does not exist; choose float16, float32, int8, int4 or topk. ",
    ):
        assert mistake in told


@pytest.mark.parametrize(
    ("content", "needed"),
    [
        (b"a: [1\n", ":2: not YAML"),
        (b"- a\n- b\n", "a recipe is a list of 'key: value' lines"),
        (b"? [a]\n: b\n", ":1: a key must be"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"x: 1\n" * (1 << 18), "larger than 1 MiB"),
        (b"a: \x00", "not YAML"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, content: bytes, needed: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert needed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_recipe_has_the_defaults(tmp_path: Path) -> None:
    assert options_with(read_recipe(written(tmp_path, "# nothing\n")), {}) == TrainOptions()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_recipe_or_a_mistake(content: bytes) -> None:
    path = Path(tempfile.gettempdir()) / f"atom-recipe-{os.getpid()}.yaml"
    path.write_bytes(content)
    with contextlib.suppress(AtomError):
        options_with(read_recipe(path), {})
    path.unlink()


def test_options_survive_being_written_and_read(tmp_path: Path) -> None:
    options = TrainOptions(
        model="tiny", data=("a b: #c",), learning_rate=6e-4, steps=3, join=("a@/x",), resume=True,
        run="r", directory=Path("/x y"), prompt="\N{SNOWMAN}: 'said'", seed=0,
    )  # fmt: skip
    assert options_with(read_recipe(written(tmp_path, recipe_text(options))), {}) == options
    assert options_with(read_recipe(written(tmp_path, recipe_text(TrainOptions()))), {}) == (
        TrainOptions()
    )


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("true", True),
        ("false", False),
        ("on", True),
        ("off", False),
        ("Auto", "auto"),
        ("", "auto"),
    ],
)
def test_whether_to_compile(tmp_path: Path, said: str, meant: bool | str) -> None:
    """Also as recipes said it that knew on and off only."""
    options = options_with(read_recipe(written(tmp_path, f"compile: {said}\n")), {})
    assert options.compile == meant
    assert options_with(read_recipe(written(tmp_path, recipe_text(options))), {}) == options


def test_what_does_not_say_whether_to_compile(tmp_path: Path) -> None:
    told = complaint(written(tmp_path, "compile: sometimes\n"))
    assert "compile must be auto, on, off, true, false, yes, no, not 'sometimes'" in told


@pytest.mark.parametrize("name", ready_recipes())
def test_a_ready_recipe_is_right(name: str) -> None:
    options_with(read_recipe(recipe_path(name)), {})
    text = recipe_path(name).read_text(encoding="utf-8")
    assert f"atom train {name}" in text, "it says how it is started"
    page = ROOT / "docs" / "recipes.md"
    assert f"| `{name}` |" in page.read_text(encoding="utf-8")


def test_names_of_recipes_are_completed() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'pretrain-small'"):
        recipe_path("pretrain-smal")
    with pytest.raises(ConfigError, match="atom init"):
        recipe_path("folder/mine.yaml")


def test_the_schema_knows_every_option() -> None:
    properties = schema()["properties"]
    names = [field.name.replace("_", "-") for field in dataclasses.fields(TrainOptions)]
    assert list(properties) == names
    assert properties["steps"]["type"] == ["integer", "null"]
    assert properties["plain"]["default"] is False
    assert properties["compile"]["enum"] == [True, False, "auto", "on", "off", "yes", "no", None]
    assert properties["compile"]["default"] == "auto"
    json.dumps(schema(), allow_nan=False)


GPU = Facts(host_bytes=64 << 30, gpu="a GPU", gpu_bytes=24 << 30)


def answering(answers: dict[str, str], asked: dict[str, str] | None = None) -> Ask:
    """Return what answers questions that contain a word, and takes the other proposals."""

    def ask(question: str, proposal: str, check: Check) -> str:
        if asked is not None:
            asked[question] = proposal
        given = [answer for word, answer in answers.items() if word in question]
        return check(given[0]) if given else proposal

    return ask


def test_init_fills_in_answers_and_the_machine() -> None:
    asked: dict[str, str] = {}
    text = filled(
        "# about\nmodel: tiny # small\ndata: books/\nsteps: 3\n",
        GPU,
        answering({"text to train on": "mine.txt"}, asked),
    )
    assert text.splitlines()[1:] == [
        "# about", "model: tiny # small", "data: mine.txt", "steps: 3", "device-memory: 21GiB",
    ]  # fmt: skip
    assert asked["device memory to use"] == "21GiB"


def test_init_asks_for_the_budget_that_a_recipe_has() -> None:
    made_for_another = "device-memory: 70GiB # of 80\n"
    small = Facts(host_bytes=64 << 30, gpu=None, gpu_bytes=0)
    assert "device-memory: 70GiB # of 80" in filled(made_for_another, small, answering({}))
    assert "device-memory: 21GiB # of 80" in filled(made_for_another, GPU, answering({}))
    given = filled(made_for_another, GPU, answering({"device memory": "9GiB"}))
    assert given.count("device-memory") == 1
    assert "device-memory: 9GiB # of 80" in given


@pytest.mark.parametrize(
    "answer",
    ["*.txt", "a: b", "a #b", "'quoted'", 'say "so"', "null", "[x]", "- x", "no", "6", "C\\x"],
)
def test_any_answer_is_read_as_it_was_given(answer: str, tmp_path: Path) -> None:
    text = filled("data: books/ # text\nsteps: 3\n", GPU, answering({"text to train": answer}))
    assert "# text" in text
    assert read_recipe(written(tmp_path, text)).values["data"] == (answer,)


class Typist:
    """Someone who types these lines, then ends."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Typist]:
    """Returns a function that puts a typist before the terminal."""

    def put(*lines: str) -> Typist:
        typist = Typist(*lines)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("builtins.input", typist)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("atomtrain.cli.init.machine_facts", lambda: GPU)
        return typist

    return put


def test_init_asks_again_after_a_wrong_answer(
    typing: Callable[..., Typist], capsys: pytest.CaptureFixture[str]
) -> None:
    typist = typing(
        "pretrain-smal", "", "tinny", "tiny", "*.txt", "many", "0", "7", "lots", "3", "2 GiB"
    )
    assert main(["init", "--out", "x.yaml"]) == 0
    options = options_of(["x.yaml"])
    assert (options.model, options.data, options.steps) == ("tiny", ("*.txt",), 7)
    assert options.device_memory == "2 GiB"
    shown = capsys.readouterr()
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == ["atom"] * 6
    for said in ("Did you mean 'pretrain-small'", "Did you mean 'tiny'", "not 'many'", "not '0'",
                 "'lots' is not a size", "memory of 3 is too little"):  # fmt: skip
        assert said in shown.err
    assert "note: *.txt matches no file" in shown.out
    assert "Train a GPT of 125 million parameters" in shown.out, "says what recipes are for"
    assert typist.prompts[-1] == "device memory to use [21GiB]: "


def test_init_takes_the_line_that_a_peer_printed(
    typing: Callable[..., Typist], capsys: pytest.CaptureFixture[str]
) -> None:
    address = (
        "mine@/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWJCGm3rTQcJcNZEtzqgqBRGP9Nm5aTDuHkrKyQu1RRpqQ"
    )
    typing("books.txt", "here", f"atom train --join {address}", "")
    assert main(["init", "--from", "join-swarm", "--out", "x.yaml"]) == 0
    assert options_of(["x.yaml"]).join == (address,)
    shown = capsys.readouterr()
    assert "which run to join is not clear" in shown.err
    assert "books.txt does not exist" in shown.out


def test_init_writes_nothing_if_it_is_left_or_cannot(
    typing: Callable[..., Typist], capsys: pytest.CaptureFixture[str]
) -> None:
    typing("")
    assert main(["init", "--out", "x.yaml"]) == 2
    assert not Path("x.yaml").exists()
    assert "--yes" in capsys.readouterr().err
    Path("file").write_text("")
    assert main(["init", "--yes", "--out", "file/x.yaml"]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert main(["init", "--from", "pretrain-smal"]) == 2
    assert "Did you mean 'pretrain-small'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ready_recipes())
def test_init_writes_a_recipe_that_is_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--yes", "--from", name, "--out", "x.yaml"]) == 0
    assert "atom train x.yaml" in capsys.readouterr().out
    options_of(["x.yaml"])
    assert main(["init", "--yes", "--out", "x.yaml"]) == 2
    assert "already there" in capsys.readouterr().err


def test_a_text_is_no_recipe_and_told_so_once(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(f"{number}: it was a dark night\n" for number in range(300)))
    with pytest.raises(ConfigError, match=r"no key in it is an option; .* give --data") as caught:
        read_recipe(path)
    assert "mistakes" not in str(caught.value), "not once for every line"


@pytest.mark.parametrize(("content", "needed"), [(" \n", "is empty"), ("[" * 5000, "not a recipe")])
def test_nothing_and_too_much_are_no_recipes(tmp_path: Path, content: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        read_recipe(written(tmp_path, content))
