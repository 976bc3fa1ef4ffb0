"""Compiles the core while the package is built; without a compiler the package has none."""

from __future__ import annotations

import importlib.util
import platform
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledCore(BuildHookInterface):
    """Adds the libraries to the wheel, which is then one for this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name what was made; an editable install finds it beside the sources."""
        path = Path(self.root, "src/atomtrain/native/build.py")
        spec = importlib.util.spec_from_file_location("atom_native_build", path)
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            # Sources are run where they are; a wheel goes to processors of all kinds.
            made = native.build(only=native.own_levels() if version == "editable" else None)
        except native.BuildError as error:
            self.app.display_warning(f"atomtrain is built without its compiled core: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(made)}"
        build_data["artifacts"] += [str(made_path.relative_to(self.root)) for made_path in made]


def platform_of(libraries: Iterable[Path]) -> str:
    """Return the machines that a wheel with these libraries is for.

    Package indexes refuse plain `linux`: PEP 600 wants the oldest glibc that will do. That is the
    newest whose symbols the libraries ask for; they need no other library.
    """
    plain = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if platform.libc_ver()[0] != "glibc":
        return plain
    asked = [
        (int(major), int(minor))
        for path in libraries
        for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())
    ]
    major, minor = max([(2, 17), *asked])  # tags of older ones are not in use
    return plain.replace("linux", f"manylinux_{major}_{minor}", 1)
