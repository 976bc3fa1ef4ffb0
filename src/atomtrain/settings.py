"""Settings declared once: a field of a dataclass with its help text and what it may be.

An owner (the engine, the rules of a swarm, a recipe) declares a field with `option`. A command that
lets its user choose it takes the declaration over with `asked`: then `None` says that the user
chose nothing. Command lines, recipe files, the JSON schema and tables of docs are made from these
fields.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from atomtrain.errors import ConfigError, choices
from atomtrain.units import parse_bytes

Check = Callable[[str, Any], object]
"""Is called with the flag and a value that was given; raises a `ConfigError` if it cannot be."""
MOST_COUNT, MOST_TOKENS = 2**31 - 1, 2**53
NAME_MAX = 64
_LEAST_BYTES = 1 << 16
"""Of what is given as a plain number."""
TRUTHS = {"on": True, "off": False, "true": True, "false": False, "yes": True, "no": False}
"""Words for a setting that is on or off."""


def option(
    default: Any,
    about: str,
    placeholder: str = "",
    flag: str | None = None,
    *,
    check: Check | None = None,
    **decides: Any,
) -> Any:
    """Return a dataclass field with the help text that the command line shows.

    Args:
        default: Of the field.
        about: The help text.
        placeholder: Stands for the value in the help.
        flag: The option's name on the command line, if it is not the field's.
        check: Refuses what cannot be.
        decides: What else the owner wants to know of the field.
    """
    metadata = {"help": about, "metavar": placeholder, "flag": flag, "check": check, **decides}
    return dataclasses.field(default=default, metadata=metadata)


def asked(owner: type[Any], name: str, default: Any = None) -> Any:
    """Return a field by which a user may choose what `owner` declares as `name`.

    `default` says that he chose nothing.
    """
    metadata = {**declared(owner, name).metadata, "owner": owner, "owner_name": name}
    return dataclasses.field(default=default, metadata=metadata)


def declared(owner: type[Any], name: str) -> dataclasses.Field[Any]:
    return next(field for field in dataclasses.fields(owner) if field.name == name)


def asked_of(kind: Any, owner: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield what a user may choose of an owner's settings: the option's name and the owner's."""
    for field in dataclasses.fields(kind):
        if field.metadata.get("owner") is owner:
            yield field.name, field.metadata["owner_name"]


def chosen(given: Any, owner: type[Any]) -> dict[str, Any]:
    """Return what a user chose of an owner's settings, by the owner's names."""
    asked_for = {theirs: getattr(given, ours) for ours, theirs in asked_of(given, owner)}
    return {name: value for name, value in asked_for.items() if value is not None}


def words_of(hint: Any) -> dict[str, Any]:
    """Return what the words mean of which a setting takes one that is on, off or something else.

    Args:
        hint: The field's type, such as `bool | Literal["auto"]`; of any other the result is empty.
    """
    kinds = typing.get_args(hint)
    names = [n for kind in kinds if kind is not bool for n in typing.get_args(kind)]
    return {**{name: name for name in names}, **TRUTHS} if bool in kinds and names else {}


def flag_of(name: str) -> str:
    """Return a field's name as the command line has it."""
    return "--" + name.replace("_", "-")


def check_fields(given: Any, label: str | None = None, besides: Iterable[str] = ()) -> None:
    """Refuse values that cannot be; `None` and the default say that nothing was given.

    Messages name the option, or the field after a `label`; `besides` are checked otherwise.
    """
    for field in dataclasses.fields(given):
        if field.name in besides:
            continue
        check, value = field.metadata.get("check"), getattr(given, field.name)
        if check is not None and value is not None and value != field.default:
            name = flag_of(field.name) if label is None else label + field.name
            try:
                check(name, value)
            except ConfigError as error:
                error.field = field.name
                raise


def count(least: int = 1, most: int = MOST_COUNT) -> Check:
    """Return what refuses whole numbers that are not in a range."""

    def check(flag: str, value: int) -> None:
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            raise ConfigError(f"{flag} must be {limit}, not {value}")

    return check


def number(fits: Callable[[float], bool], said: str, form: str = "") -> Check:
    """Return what refuses numbers that do not fit; `said` says which do, `form` writes one."""

    def check(flag: str, value: float) -> None:
        if not fits(value):
            raise ConfigError(f"{flag} must be {said}, not {value:{form}}")

    return check


def one_of(allowed: Iterable[str], what: str | None = None) -> Check:
    """Return what refuses names that are not in a list; `what` stands in the flag's place."""
    names = tuple(allowed)

    def check(flag: str, value: str) -> None:
        if value not in names:
            raise ConfigError(
                f"{what or flag} {value!r} does not exist; choose {choices(str(value), names)}"
            )

    return check


def check_counts(given: Any, *names: str, least: int = 1, most: int = MOST_COUNT) -> None:
    """Refuse options of these names that are given and not in a range."""
    for name in names:
        if (value := getattr(given, name)) is not None:
            count(least, most)(flag_of(name), value)


def check_size(flag: str, text: str) -> None:
    """Refuse what is not a number of bytes, or so few that a unit was forgotten."""
    if parse_bytes(text, flag) < _LEAST_BYTES and text.strip().isdecimal():
        raise ConfigError(f"{flag} {text} would be {text} bytes; write the unit, such as {text}GiB")


def memory_of(given: Any) -> dict[str, Any]:
    """Return `host_memory_bytes` and `device_memory_bytes`, as far as they are given.

    Raises:
        ConfigError: one is not a size.
    """
    return {
        f"{name}_bytes": parse_bytes(text, flag_of(name))
        for name in ("host_memory", "device_memory")
        if (text := getattr(given, name)) is not None
    }


def check_seed(flag: str, seed: int) -> None:
    """Refuse what no random generator takes."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"{flag} must be 0 to 2^63 - 1, not {seed}")


def check_text(flag: str, text: str) -> None:
    """Refuse bytes that are no text; Python's strings may carry them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{flag} is not text in UTF-8; write it in that encoding") from error


def check_port(flag: str, port: int) -> None:
    if not 0 <= port < 65536:
        raise ConfigError(f"{flag} must be 0 to 65535, not {port}")


def check_ip4(flag: str, host: str) -> None:
    """Refuse what is not an address to listen on."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError as error:
        raise ConfigError(
            f"{flag} {host!r} is no IPv4 address; give 0.0.0.0 (all) or one of this machine's"
        ) from error


def check_name(flag: str, name: str) -> None:
    """Refuse what no run and no peer can be called."""
    if not is_name(name):
        raise ConfigError(
            f"{flag} {name!r} is not a name; use 1 to {NAME_MAX} letters, digits, '-', '_' or '.'"
        )


def is_name(name: str) -> bool:
    """Whether a run or a peer can be called so: a folder and a part of addresses."""
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    return 0 < len(name) <= NAME_MAX and plain.isalnum() and plain.isascii()
