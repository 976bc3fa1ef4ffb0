"""What low-rank adapters are asked for by. No torch here: mistakes are told at once.

See `atomtrain.models.lora` for what is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atomtrain.errors import ConfigError, nearest

ALL_LINEAR = "all-linear"
BITS = (8, 4)
"""Of a frozen matrix that is held narrow."""
MXFP4, NF4, FP8, STEPS, STEPS8, ROWS = "mxfp4", "nf4", "fp8", "steps", "steps8", "rows"
"""Numbers that folders publish and `bits` keeps: see `models/forms.py`."""
_HELD_IN = {MXFP4: (4,), NF4: (4,), FP8: (8,), STEPS: (8, 4), STEPS8: (8,), ROWS: (8,)}
"""The `bits` that keep each."""
_TILE = r"\d{1,6}x\d{1,6}"
_KEPT = re.compile(rf"{MXFP4}|{NF4}|{ROWS}|{FP8} {_TILE}|({STEPS}|{STEPS8}) {_TILE}( sorted)?")
NOTHING, PISSA, OLORA = "nothing", "pissa", "olora"
"""How adapters begin; `pissa_niter_16` is another, with any number. See `models/lora_init.py`."""
_ROUNDS = re.compile(rf"{PISSA}_niter_([1-9]\d{{0,3}})")
_MOST_RANK = 1 << 16
_EXAMPLE = "r=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What is adapted, and how."""

    r: int = 8
    """Rank of the adapters."""
    alpha: float = 16.0
    """The adapter's output is multiplied by `alpha / r`, or with `rslora` by `alpha / sqrt(r)`."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Last names of linear layers, of embeddings, of modules with experts or of their parameters;
    `all-linear` stands for all linear layers but the head, and for nothing else."""
    dora: bool = False
    """Train the length of the adapted matrix's rows as well."""
    rslora: bool = False
    """Let the adapter's output not shrink with a larger rank (Kalajdzievski 2023)."""
    dropout: float = 0.0
    """Share of the adapter's inputs that training leaves out."""
    init: str = NOTHING
    """How adapters begin: at `nothing`, or with the main part of their matrix, which is taken out
    of the frozen one: `pissa`, `pissa_niter_16` or `olora`."""
    bits: int | None = None
    """Hold the frozen linear layers and experts in 8 or 4 bits, adapted or not; `None`: as they
    are. See `models/narrow.py`."""
    published: str | None = None
    """Which numbers the model's folder has that `bits` can keep, such as `mxfp4`, or `fp8 128x128`
    with a tile's rows and columns (0 stands for all), and `sorted` where the columns of a tile are
    told one by one. The folder decides, not the user."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained themselves, with all that is in them: the last one, or the
    end of a path such as `mlp.gate`."""

    def __post_init__(self) -> None:
        if not 1 <= self.r <= _MOST_RANK:
            raise ConfigError(
                f"--lora r={self.r} must be at least 1 and at most {_MOST_RANK}, such as {_EXAMPLE}"
            )
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ConfigError(f"--lora alpha={self.alpha} must be above 0, such as {_EXAMPLE}")
        if not self.targets or not all(isinstance(t, str) and t for t in self.targets):
            raise ConfigError(f"--lora targets= names nothing; give some, such as {_EXAMPLE}")
        if not all(isinstance(name, str) and name for name in self.modules_to_save):
            raise ConfigError(
                "--lora modules_to_save= has an empty name; write for example "
                "modules_to_save=embed_tokens+lm_head"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--lora dropout={self.dropout} must be at least 0 and below 1")
        if self.dropout and self.dora:
            raise ConfigError(
                "--lora dora=true takes no dropout: the length of a row is that of the whole "
                "matrix; leave one of them out"
            )
        if self.init not in (NOTHING, PISSA, OLORA) and not _ROUNDS.fullmatch(str(self.init)):
            raise ConfigError(
                f"--lora init={self.init} must be {PISSA}, {PISSA}_niter_16 (or another number of "
                f"rounds), {OLORA} or {NOTHING}"
            )
        if self.bits is not None and self.bits not in BITS:
            raise ConfigError(f"--lora bits={self.bits} must be 8 or 4")
        if self.published is not None and not _KEPT.fullmatch(str(self.published)):
            raise ConfigError(
                f"--lora published={str(self.published)[:40]} must be {MXFP4}, {NF4}, {ROWS}, or "
                f"like '{FP8} 128x128', '{STEPS} 1x128', '{STEPS8} 1x128' or '{STEPS} 1x128 sorted'"
            )
        # Without bits a matrix stays wide, whatever was published.
        if self.bits is not None and self.published is not None:
            held_in = _HELD_IN[self.published.split()[0]]
            if self.bits not in held_in:
                raise ConfigError(
                    f"--lora published='{self.published}' goes with bits="
                    f"{' or '.join(map(str, held_in))}, not with bits={self.bits}"
                )

    def published_as(self, settings: Mapping[str, Any] | None) -> LoraConfig:
        """Return the same with `published`; `settings` tell how a model's folder is quantised."""
        said = settings or {}
        method, kept = said.get("quant_method"), None
        if self.bits is not None and method in ("gptq", "awq"):
            kind = {2: STEPS, 4: STEPS, 8: STEPS8}.get(said.get("bits", 0))
            if kind is not None and self.bits in _HELD_IN[kind]:
                wide = max(0, said.get("group_size", -1))
                in_any_order = method == "gptq" and said.get("desc_act") and wide
                kept = f"{kind} 1x{wide}{' sorted' if in_any_order else ''}"
        elif self.bits == 4:
            kept = {"mxfp4": MXFP4, "bitsandbytes": NF4}.get(str(method))
        elif self.bits == 8 and method == "fp8":
            rows, columns = said.get("weight_block_size") or (0, 0)
            kept = f"{FP8} {rows}x{columns}"
        elif self.bits == 8 and method == "bitsandbytes":
            kept = ROWS
        return replace(self, published=kept)

    @property
    def kept(self) -> tuple[str | None, tuple[int, int]]:
        """The published numbers that are kept, if any, and the size of their tiles."""
        if self.published is None:
            return None, (0, 0)
        kind, *rest = self.published.split()
        rows, columns = rest[0].split("x") if rest else (0, 0)
        return kind, (int(rows), int(columns))

    @property
    def sorts(self) -> bool:
        """Whether columns of linear layers are sorted by the tile that they are published in."""
        return (self.published or "").endswith(" sorted")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def as_ordinary(self) -> LoraConfig:
        """What adapters of the published matrices are, twice as wide, if `init` changed those."""
        grown = math.sqrt(2) if self.rslora else 2
        return replace(self, init=NOTHING, r=2 * self.r, alpha=grown * self.alpha)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoraConfig:
        """Read what `dataclasses.asdict` made, possibly through JSON."""
        targets = tuple(data["targets"])
        saved = tuple(data.get("modules_to_save", ()))
        return cls(**{**data, "targets": targets, "modules_to_save": saved})


def rounds_of(init: str) -> int | None:
    """Return N of `pissa_niter_N`, `None` for another."""
    found = _ROUNDS.fullmatch(init)
    return None if found is None else int(found[1])


def parse_lora(text: str) -> LoraConfig:
    """Return what `r=8,alpha=16,targets=q_proj+v_proj,dora=true,bits=4` says.

    Raises:
        ConfigError: an unknown or missing value; says what is known.
    """
    known = [*_VALUES]
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in known:
            raise ConfigError(
                f"--lora has no part {name!r}.{nearest(name, known)} Write for example {_EXAMPLE}"
            )
        if not equals or not value:
            raise ConfigError(f"--lora {name} lacks a value; write for example {_EXAMPLE}")
        try:
            values[name] = _VALUES[name](value)
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"--lora {name}={value} cannot be; write for example {_EXAMPLE}"
            ) from error
    return LoraConfig(**values)


def _names(value: str) -> tuple[str, ...]:
    return tuple(value.split("+"))


_FLAG = {"true": True, "false": False}.__getitem__
_VALUES: dict[str, Any] = {
    "r": int,
    "alpha": float,
    "bits": int,
    "dora": _FLAG,
    "rslora": _FLAG,
    "dropout": float,
    "init": str,
    "targets": _names,
    "modules_to_save": _names,
}
