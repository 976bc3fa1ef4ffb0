"""What is installed: code, recipes, the web page, figures of hardware; and nothing else."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from atomtrain.native.build import BuildError, compiler
from tests.support import ROOT
from tests.support.waiting import PATIENCE_S

NEEDED = (
    "atomtrain/py.typed",
    "atomtrain/recipes/pretrain-small.yaml",
    "atomtrain/views/dashboard/static/app.js",
    "atomtrain/views/dashboard/static/index.html",
    "atomtrain/views/dashboard/static/style.css",
    "atomtrain/views/dashboard/static/vendor/README.md",
    "atomtrain/views/dashboard/static/vendor/uPlot.LICENSE",
    "atomtrain/views/dashboard/static/vendor/uPlot.iife.min.js",
    "atomtrain/views/dashboard/static/vendor/uPlot.min.css",
    "atomtrain/planning/hardware.json",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_the_wheel_has_everything_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for needed in NEEDED:
        assert needed in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any("/licenses/" in name and name.endswith("uPlot.LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"atomtrain", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".safetensors")]


@pytest.mark.slow
def test_the_wheel_brings_its_core_where_no_compiler_is(built: Path, tmp_path: Path) -> None:
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    (wheel,) = built.glob("*.whl")
    platform = wheel.stem.split("-")[-1]
    assert not platform.startswith("linux"), "package indexes refuse such a wheel"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "from atomtrain.native import library as it; print(it.core(), it)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PATH": "", "CC": "/nonexistent"},
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("<CDLL"), done.stderr
    assert str(tmp_path) in done.stdout.split("<module")[1]


def test_the_sources_are_complete(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "Makefile", "mkdocs.yml", "Containerfile", "docs/index.md",
                   "examples/trainer.py", "tests/unit/house/test_packaging.py", "CITATION.cff",
                   "CONTRIBUTING.md", ".github/workflows/test.yml"):  # fmt: skip
        assert needed in names
    assert {f"src/{needed}" for needed in NEEDED} <= names


@pytest.mark.slow
def test_the_container_has_all_that_its_wheel_is_made_of(tmp_path: Path) -> None:
    """Its first stage is done here, without the image: what it copies makes a wheel with a core."""
    pytest.importorskip("hatchling")
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    first, second = (ROOT / "Containerfile").read_text("utf-8").split("\nFROM ")[1:]
    assert "-slim" in second.partition("\n")[0]
    for line in first.splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                into = tmp_path / target.strip("/")
                if (ROOT / source).is_dir():
                    ignored = shutil.ignore_patterns("*.so", "__pycache__")
                    shutil.copytree(ROOT / source, into, ignore=ignored)
                else:
                    into.mkdir(exist_ok=True)
                    shutil.copy(ROOT / source, into)
    quick = tmp_path / "cc"  # the other wheel is compiled as users compile it
    quick.write_text(f'#!/bin/sh\nexec {shlex.join(compiler())} "$@" -O0\n')
    quick.chmod(0o755)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=tmp_path / "src", capture_output=True, timeout=PATIENCE_S, check=True,
        env={**os.environ, "CC": str(quick)},
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "linux" in wheel.name, "it has its compiled core"


def test_all_lists_of_pythons_name_the_same() -> None:
    """What the package says it runs with is what CI and `scripts/torch-versions` try."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert {*matrix["python"], *(job["python"] for job in matrix["include"])} == set(named)
    tried = re.search(
        r'^PYTHONS = "(.*)"$', (ROOT / "scripts/torch-versions").read_text("utf-8"), re.M
    )
    assert tried is not None
    assert tried[1].replace("python", "").split(",") == named
    assert project["requires-python"] == f">={named[0]}"
