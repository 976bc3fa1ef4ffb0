"""The documentation: every command in it is one that exists, links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atombench.pages.__main__ import DOCS, WHOLE
from atombench.pages.code_tables import commands
from atomtrain.cli.completion import SHELLS, all_parsers
from atomtrain.cli.main import COMMANDS, main
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe_files import ready_recipes
from tests.support.doc_commands import MADE, PAGES, ROOT, Shown, shown_commands
from tests.support.waiting import PATIENCE_S

SHOWN = list(shown_commands())
README = ROOT / "README.md"
CODE = (
    ROOT / "src" / "atomtrain",
    ROOT / "src" / "atomtrain" / "swarm",
    ROOT / "benchmarks",
    ROOT / "research",
    ROOT,
)
"""From where pages name files."""
OF_THIS_CODE = [page for page in PAGES if page.name != "transports.md"]
"""The page of hivemind names files of hivemind."""
PARSERS = all_parsers()


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: " ".join(shown.words)[:60])
def test_a_command_in_the_documentation_exists(shown: Shown) -> None:
    words = shown.words
    assert words[0] in (*COMMANDS, "--help"), words
    if words[0] == "--help":
        return
    nested = " ".join(words[:2])
    parser, rest = (
        (PARSERS[nested], words[2:]) if nested in PARSERS else (PARSERS[words[0]], words[1:])
    )
    given = vars(parser.parse_args(list(rest)))
    if words[0] == "train":
        recipe = given.pop("recipe", None)
        assert recipe is None or recipe in ready_recipes() or recipe.endswith(".yaml")
        for name in ("run_key", "allow", "identity"):  # files that need not be there
            given.pop(name, None)
        lists = {"join", "metrics"}
        TrainOptions(**{k: tuple(v) if k in lists else v for k, v in given.items()})


def test_there_are_commands_that_are_run() -> None:
    assert sum(shown.runs for shown in SHOWN) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            made = Path(target).name in MADE
            assert made or (page.parent / target).exists(), target


def test_pictures_are_small_and_each_is_shown_somewhere() -> None:
    """Links to them are looked at above."""
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"\]\([^)]*pictures/([^)]+)\)", page.read_text())
    }
    pictures = {path.name: path.stat().st_size for path in (ROOT / "docs/pictures").iterdir()}
    assert set(pictures) == shown
    assert max(pictures.values()) <= 150_000
    assert README.read_text(encoding="utf-8").count("![") == 1


@pytest.mark.parametrize("page", OF_THIS_CODE, ids=lambda page: page.name)
def test_files_and_functions_that_a_page_names_are_there(page: Path) -> None:
    for place, name in re.findall(r"`([\w/]+/\w+\.py)(?::([\w.]+))?`", page.read_text("utf-8")):
        found = [folder / place for folder in CODE if (folder / place).is_file()]
        assert found, f"{place} is not there"
        assert not name or name in defined_in(found[0]), f"{place} does not define {name}"


def defined_in(path: Path) -> set[str]:
    """Return the functions, classes and methods of a file, methods behind their class."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            inside = node.body if isinstance(node, ast.ClassDef) else []
            names |= {f"{node.name}.{each.name}" for each in inside if hasattr(each, "name")}
    return names


def test_the_page_of_commands_has_every_option() -> None:
    page = commands()
    for words, parser in PARSERS.items():
        assert f"## atom {words}\n" in page
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                for flag in action.option_strings[-1:]:
                    assert flag in page or flag == "--help", flag
    assert "usage:" not in page


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "book.txt").touch()
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for word in ("train", "device-memory", "status", "swarm"):
        assert word in text
    if shell == "bash":
        lines = {
            "tra": "train", "train --device-m": "--device-memory", "train pre": "pretrain-small",
            "swarm st": "status", "swarm status --js": "--json", "bench rep": "report",
            "bench report --res": "--results", "plan gpt3-175": "gpt3-175b",
            "completion f": "fish", "train --data b": "book.txt",
        }  # fmt: skip
        for line in lines:
            text += f"COMP_WORDS=(atom {line}); COMP_CWORD={len(line.split())}; _shtab_atom\n"
            text += 'echo "${COMPREPLY[*]}"\n'
        done = subprocess.run(
            ["bash", "-c", text],
            capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=tmp_path,
        )  # fmt: skip
        assert dict(zip(lines, done.stdout.split("\n"), strict=False)) == lines
        assert done.stderr == ""


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    made = {DOCS / f"{name}.md": page for name, page in WHOLE.items()}
    assert {path.name for path in made} == set(MADE)
    missing = [path for path in made if not path.exists()]
    for path in missing:
        path.write_text(made[path](), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1", "HOME": str(tmp_path)},
        )  # fmt: skip
    finally:
        for path in missing:
            path.unlink()
    assert done.returncode == 0, done.stderr
    assert "atom train" in (tmp_path / "commands" / "index.html").read_text(encoding="utf-8")
