"""`scripts/release` refuses in one line, and its checksums are those that tools read."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import atomtrain
from tests.support import ROOT
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def release() -> ModuleType:
    loader = SourceFileLoader("release_script", str(ROOT / "scripts" / "release"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of version 1.2, with one commit."""
    for name, text in {
        "src/atomtrain/__init__.py": '__version__ = "1.2"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2\n\n## 1.1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release", tmp_path / "scripts")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    subprocess.run(["git", *who, *words], cwd=root, check=True, timeout=PATIENCE_S)


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "-q", "--allow-empty", "-m", "a change")


def refusal(root: Path) -> str:
    """Return what the script says; without `build` it refuses, too, once all else is well."""
    done = subprocess.run(
        [sys.executable, "-S", root / "scripts" / "release"],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert not (root / "dist").exists()
    return line


@pytest.mark.parametrize("heading", ["## 1.2.1", "## 1", "## 11.2", "### 1.2", "## Unreleased"])
def test_a_version_without_a_section_in_the_changelog(checkout: Path, heading: str) -> None:
    (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n", encoding="utf-8")
    assert "CHANGELOG.md has no section '## 1.2'" in refusal(checkout)


def test_a_tag_of_another_commit(checkout: Path) -> None:
    git(checkout, "tag", "-a", "-m", "it", "v1.2")
    assert "build is missing" in refusal(checkout)
    commit(checkout)
    assert "the tag v1.2 is of another commit" in refusal(checkout)


def test_a_tag_of_another_version(
    checkout: Path, release: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    release.check(checkout, "1.2")
    assert capsys.readouterr().out == (
        "release: note that no tag says this version; git tag v1.2\n"
    )
    git(checkout, "tag", "v1.3")
    assert "this commit has the tag v1.3" in refusal(checkout)
    git(checkout, "tag", "v1.2")
    release.check(checkout, "1.2")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("heading", ["## 1.2", "## [1.2] - 2026-11-26", "## v1.2"])
def test_a_section_has_the_version_and_perhaps_a_date(
    checkout: Path, heading: str, release: ModuleType
) -> None:
    (checkout / "CHANGELOG.md").write_text(f"{heading}\n", encoding="utf-8")
    release.check(checkout, "1.2")


def test_this_version_has_its_section(release: ModuleType) -> None:
    assert release.version_of(ROOT) == atomtrain.__version__
    assert f"\n## {atomtrain.__version__}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == atomtrain.__version__
    assert {"cff-version", "title", "message", "authors", "license"} <= set(citation)


def test_who_reports_a_bug_is_asked_for_the_report() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in folder.iterdir()}
    assert set(forms) == {"bug", "feature"}
    for form in forms.values():
        assert {"name", "description", "body"} <= set(form)
    (report,) = [part for part in forms["bug"]["body"] if part["id"] == "report"]
    assert "`atom report runs/RUN`" in report["attributes"]["description"]
    assert report["validations"]["required"] is True


def test_the_workflow_tests_each_python_and_the_oldest_torch() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8"))
    matrix = flow["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (oldest,) = [one for one in project["dependencies"] if one.startswith("torch>=")]
    assert oldest.removeprefix("torch>=") + ".*" in [job["torch"] for job in matrix["include"]]
    assert {axis for job in matrix["include"] for axis in job} <= set(matrix)
    plain = {key: values for key, values in matrix.items() if key != "include"}
    changed = [job for job in matrix["include"] if all(job[key] in plain[key] for key in job)]
    assert not changed, "GitHub would put its values into a job that is there"
    [others] = [job["others"] for job in matrix["include"] if "==" in job.get("others", "")]
    least = {one.replace("==", ">=").removesuffix(".*") for one in others.split()}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    images = extras["optional-dependencies"]["images"]
    assert least <= {*project["dependencies"], *images}, "the oldest that are allowed are tested"
    assert "3.14" in [job["python"] for job in matrix["include"]]
    (tests,) = [step for step in flow["jobs"]["test"]["steps"] if step.get("name") == "Test"]
    assert tests["run"].startswith("make test ")


def test_a_wheel_without_its_core_and_an_absent_twine(
    tmp_path: Path, release: ModuleType, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made = "atomtrain-1.2-py3-none-manylinux_2_17_x86_64.whl"
    monkeypatch.setattr(release.importlib.util, "find_spec", lambda name: name == "build" or None)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: (tmp_path / made).touch())
    release.build(tmp_path)
    assert capsys.readouterr().out == (
        "release: twine is not installed, so `twine check` was skipped\n"
    )
    made = "atomtrain-1.2-py3-none-any.whl"
    with pytest.raises(release.ReleaseError, match="without its compiled core"):
        release.build(tmp_path)


def test_checksums_are_those_of_sha256sum(tmp_path: Path, release: ModuleType) -> None:
    for name in ("a-1.2.tar.gz", "a-1.2.whl"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    release.write_sums(tmp_path)
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK") == 2
    (tmp_path / "a-1.2.whl").write_text("another", encoding="utf-8")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_sums_are_signed_where_there_is_a_key(
    tmp_path_factory: pytest.TempPathFactory, release: ModuleType,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    keys, folder = (tmp_path_factory.mktemp(name) for name in ("keys", "dist"))
    keys.chmod(0o700)
    monkeypatch.setenv("GNUPGHOME", str(keys))
    (folder / release.SUMS).write_text("sums\n", encoding="utf-8")
    release.sign(folder / release.SUMS)
    assert "was not signed" in capfd.readouterr().out
    new = ["--passphrase", "", "--quick-generate-key", "a tester", "ed25519", "sign"]
    try:
        subprocess.run(["gpg", "--batch", *new], check=True, timeout=PATIENCE_S)
        release.sign(folder / release.SUMS)
        signature = folder / f"{release.SUMS}.asc"
        subprocess.run(["gpg", "--verify", signature, folder / release.SUMS], check=True)
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], check=False)
