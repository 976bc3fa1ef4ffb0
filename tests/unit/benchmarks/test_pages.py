"""What is made of the pages in `docs/` is that of code and results; what is around it stays."""

from __future__ import annotations

import re

import pytest

from atombench.pages import __main__ as pages
from atombench.pages import plan_tables
from atomtrain.errors import ConfigError, PlanError
from atomtrain.models.gpt_config import GPT3
from atomtrain.planning.catalogue import ASSUMED_DISK, gpu
from atomtrain.views.plans.subject import subject

MADE = pages.parts()
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in pages.DOCS.glob("*.md")}
USED = {name: re.findall("^<!--made:(.*)-->$", text, re.M) for name, text in TEXTS.items()}
CHECKED = [name for name, used in USED.items() if used and name != "plans"]
"""Plans take minutes; a row is checked below."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_what_is_made_of_a_page_is_that_of_code_and_results(name: str) -> None:
    assert pages.filled(TEXTS[name], MADE) == TEXTS[name], f"run python -m atombench.pages {name}"


def test_every_part_is_on_one_page() -> None:
    assert sorted(name for used in USED.values() for name in used) == sorted(MADE)


def test_only_what_is_between_marks_is_written() -> None:
    text = "before\n<!--made:a-->\n{}<!--end-->\nafter\n<!--made:b-->\n{}<!--end-->\n"
    made = {"a": lambda: "new\n", "b": lambda: "| b |\n"}
    assert pages.filled(text.format("old\n", ""), made) == text.format("new\n", "| b |\n")

    assert pages.filled("no part\n", {}) == "no part\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!--made:scael-->\n<!--end-->\n", "Did you mean 'scale'"),
        ("<!--made:scale-->\n", "needs an <!--end-->"),
        ("<!--end-->\n", "needs an <!--end-->"),
        ("<!--made:scale-->\n<!--made:metrics-->\n<!--end-->\n", "before the next one"),
    ],
)
def test_marks_that_make_no_sense_are_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        pages.filled(text, MADE)


def test_a_page_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["scalee"]) == 2
    assert "Did you mean 'scale'?" in capsys.readouterr().err


def test_the_page_of_hardware_names_the_disk_that_is_assumed() -> None:
    assert f"`{ASSUMED_DISK}` is assumed" in TEXTS["hardware"]


@pytest.mark.slow
def test_the_page_of_plans_has_a_row_for_each_model_and_gpu() -> None:
    for card in plan_tables.CARDS:
        table = TEXTS["plans"].partition(f"## {gpu(card).title}\n")[2].partition("\n## ")[0]
        rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
        assert [row for row in rows if row.startswith("gpt3")] == list(GPT3)
    name = "gpt3-small"
    row = plan_tables.plan_row(name, plan_tables.auto_report(name, gpu("h100")))
    assert f"| {' | '.join(row)} |\n" in TEXTS["plans"], "run python -m atombench.pages plans"


@pytest.mark.slow
def test_rows_are_complete_for_models_that_fit_and_for_those_that_do_not() -> None:
    row = plan_tables.plan_row("tiny", plan_tables.report_of(subject("tiny", 16), gpu("rtx-3090")))
    refused = plan_tables.plan_row("large", PlanError("no plan fits 1 MiB; raise the budget"))
    assert len(row) == len(refused) == 9
    assert refused[-1] == "does not fit: no plan fits 1 MiB"
