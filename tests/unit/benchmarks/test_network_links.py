"""Links as people write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atombench.common import BenchmarkOptions
from atombench.links.shaping import Link
from atombench.network.model import ModelSetup
from atombench.network.setup import StandsFor, parse_links, stand_in
from atomtrain.cli.main import main
from atomtrain.errors import ConfigError


def test_links_have_a_rate_a_round_trip_and_a_loss_in_any_order() -> None:
    plain, stand_ins = parse_links(
        ["100Mbit/s,50ms,0.5%", "1%, 0.1s, 10Mbit/s", "unshaped", "1Gbit/s"]
    )
    assert plain == (
        Link(bits_per_s=1e8, round_trip_s=0.05, loss_share=0.005),
        Link(bits_per_s=1e7, round_trip_s=0.1, loss_share=0.01),
        Link(bits_per_s=None),
        Link(bits_per_s=1e9),
    )
    assert stand_ins == ()


def test_links_with_a_gpu_stand_for_that_gpu_s() -> None:
    plain, stand_ins = parse_links(
        ["rtx-3090,100Mbit/s,30ms,1%", "rtx-3090,10Mbit/s,gpt3-xl", "10Mbit/s"]
    )
    assert stand_ins == (
        StandsFor("rtx-3090", 1e8, None, 0.03, 0.01),
        StandsFor("rtx-3090", 1e7, "gpt3-xl"),
    )
    assert len(plain) == 1
    assert stand_in(ModelSetup(), stand_ins[0], 1e10).loss_share == 0.01


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("50ms", "has no rate"),
        ("10Mbit/s,20Mbit/s", "two of a kind"),
        ("10Mbit/s,gpt3-xl", "a model but no GPU"),
        ("10Mbit/s,rtx-309O", "rtx-3090"),
        ("rtx-3090,unshaped", "needs a rate"),
        ("10Mbit/s,1.2.3ms", "not a number"),
        ("10Mbit/s,80%", "0 to 0.5"),
        ("10Mbit/s,", "nothing that a link has. Write RATE"),
    ],
)
def test_mistakes_in_a_link_say_what_is_allowed(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse_links([text])


def test_given_links_exclude_chosen_ones() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        BenchmarkOptions(link=("10Mbit/s",), links="plain")
    BenchmarkOptions(link=("10Mbit/s",), links="alone")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["swap", "--picture", "x.png"], "draws no --picture; network and time-to-loss do"),
        (["network", "--picture", "x.txt"], "ends in .png"),
        (["network", "--picture", "nowhere/x.png"], "a folder that exists"),
    ],
)
def test_a_picture_that_cannot_be_is_told_before_measuring(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err
