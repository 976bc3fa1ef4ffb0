"""The page of plans: made from the code, and what treatments of embedding and head are."""

from __future__ import annotations

from atombench.pages import plans_page
from atombench.pages.treatments import loaded_bytes, treatments
from atomtrain.errors import PlanError
from atomtrain.models.gpt_config import GPT3
from atomtrain.planning.catalogue import gpu
from atomtrain.views.plans.subject import subject
from tests.support import ROOT

PAGE = ROOT / "docs" / "plans.md"


def test_the_page_is_the_generator_s_text_with_a_row_for_each_model_and_gpu() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(plans_page._INTRODUCTION)
    assert plans_page._TREATMENTS in text
    assert plans_page._HOST_MEMORY in text
    for card in plans_page.CARDS:
        table = text.partition(f"## {gpu(card).title}\n")[2].partition("\n## ")[0]
        rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
        assert [row for row in rows if row.startswith("gpt3")] == list(GPT3)


def test_rows_are_complete_for_models_that_fit_and_for_those_that_do_not() -> None:
    row = plans_page._plan_row("tiny", plans_page._report(subject("tiny", 16), gpu("rtx-3090")))
    refused = plans_page._plan_row("large", PlanError("no plan fits 1 MiB; raise the budget"))
    assert row.count("|") == refused.count("|") == 10
    assert refused.endswith("| does not fit: no plan fits 1 MiB |")


def test_treatments_are_planned_with_one_sequence_a_micro_batch() -> None:
    found = list(treatments(subject("tiny", 16), gpu("rtx-3090"), 1 << 30, 2))
    assert [item.text for item in found] == [
        "none", "embedding on the host", "resident where it pays",
        "optimizer on the device where it pays", "head in 8 pieces", "all, where they pay",
    ]  # fmt: skip
    for item in found:
        assert not isinstance(item.found, PlanError)
        assert item.least_bytes <= item.found.plan.device_peak_bytes
        assert item.found.tokens_per_step == 2 * 16
        if item.text == "embedding on the host":
            assert item.found.plan.host_layers == 1
            assert loaded_bytes(item.found) < loaded_bytes(found[0].found)
        elif item.found.plan.host_layers == 0 and not item.found.plan.device_blocks:
            assert loaded_bytes(item.found) >= item.found.analysis.parameter_bytes
        if item.text in ("none", "embedding on the host", "head in 8 pieces"):
            assert item.found.plan.resident_blocks == ()
