"""Sizes, rates and durations: what users write is read back as they meant it, or refused."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomtrain.errors import ConfigError
from atomtrain.units import format_bytes, format_count, format_seconds, parse_bytes, parse_rate

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20,
         "GiB": 2**30}  # fmt: skip


@given(
    st.integers(1, 9999),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from([str.lower, str.upper, str]),
)
def test_a_number_and_a_unit_are_read_in_any_writing(
    number: int, unit: str, space: str, case: type[str]
) -> None:
    assert parse_bytes(f" {number}{space}{case(unit)} ") == number * UNITS[unit]


def test_fractions_and_plain_numbers() -> None:
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes(".5KiB") == 512
    assert parse_bytes("2.KiB") == 2048
    assert parse_bytes(12345) == 12345
    assert parse_bytes("1") == 1


@given(st.integers(1, 2**53))
def test_what_is_printed_is_read_back_within_rounding(value: int) -> None:
    read = parse_bytes(format_bytes(value))
    assert abs(read - value) <= 0.06 * 1024 ** int(math.log(value, 1024)) + 0.5


@pytest.mark.parametrize(
    "nonsense",
    ["", " ", "lots", "-1GiB", "1GiBs", "1 2", "1e9", "1,5GB", "0", "0.0", "0.4", "GiB", "nan",
     "inf", "1/2", "5 %", "9" * 400, "2000000TiB", 0, -5, True, 10**400],
)  # fmt: skip
def test_nonsense_sizes_are_refused_and_the_option_is_named(nonsense: str | int) -> None:
    with pytest.raises(ConfigError, match=r"^--device-memory .*(256MiB)"):
        parse_bytes(nonsense, "--device-memory")


def test_rates_in_bits_and_bytes() -> None:
    assert parse_rate("100Mbit/s") == 12_500_000
    assert parse_rate("100 mbit") == 12_500_000
    assert parse_rate("4GiB/s") == 4 * 2**30
    assert parse_rate("1.5KB/S") == 1500
    assert parse_rate(2.5) == 2.5
    assert parse_rate("7") == 7


@pytest.mark.parametrize(
    "nonsense",
    ["", "/s", "fast", "0", "0Mbit/s", "-1GB/s", "1GB/h", "1parsec/s", math.nan, math.inf, 0, -1,
     True, 10**400, "9" * 400],
)  # fmt: skip
def test_nonsense_rates_are_refused_and_the_option_is_named(nonsense: str | float) -> None:
    with pytest.raises(ConfigError, match=r"^--link .*is not a rate; write for example"):
        parse_rate(nonsense, "--link")


@given(st.text(max_size=12))
def test_any_text_gives_a_number_or_the_typed_error(text: str) -> None:
    for parse in (parse_bytes, parse_rate):
        with contextlib.suppress(ConfigError):  # any other error is a failure
            assert parse(text) > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"),
     (5 * 2**50, "5120.0 TiB"), (-2048, "-2.0 KiB")],
)  # fmt: skip
def test_bytes_are_printed_with_binary_units(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 us"), (0.00085, "850 us"), (0.0125, "12.5 ms"), (3.2, "3.20 s"), (245, "4 min 05 s"),
     (7800, "2 h 10 min"), (3599.7, "1 h 00 min"), (119.6, "2 min 00 s"), (360000, "100 h 00 min")],
)  # fmt: skip
def test_seconds_are_printed_in_fitting_units(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (999.5, "999.5"), (1000, "1k"), (12_345, "12.3k"), (999_499, "999k"),
     (999_999, "1M"), (4.1e6, "4.1M"), (999.9e6, "1B"), (175e9, "175B"), (1e15, "1000T")],
)  # fmt: skip
def test_counts_are_printed_in_fitting_units(value: float, text: str) -> None:
    assert format_count(value) == text


@given(st.floats(1000, 1e14))
def test_a_printed_count_never_needs_an_exponent(value: float) -> None:
    text = format_count(value)
    assert "e" not in text
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[text[-1]]
    assert float(text[:-1]) * scale == pytest.approx(value, rel=0.006)
