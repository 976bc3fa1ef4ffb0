"""Mistakes on the command line: exit code 2, one line that helps, nothing lost."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from atombench import forks
from atombench.mistakes import FILES, MISTAKES, Mistake
from atomtrain.cli.main import main
from atomtrain.progress import Progress
from tests.support.swarm_configs import swarm_config
from tests.support.waiting import PATIENCE_S

PEER_ID = "12D3KooWJCGm3rTQcJcNZEtzqgqBRGP9Nm5aTDuHkrKyQu1RRpqQ"
QUICK = ("--threads", "1", "--plain", "--steps", "2", "--sequences", "2", "--context", "32")
NO_TEXT = "\udcff"
"""How Python passes on a byte that is not text in UTF-8."""
TINY = ("--model", "tiny", *QUICK)

Complaint = Callable[..., str]


def write_text(path: Path, lines: int = 300) -> Path:
    """Write a text that is long enough to train on."""
    words = ["peer", "swarm", "layer", "slot", "anchor", "round", "token", "plan", "step", "light"]
    path.write_text(
        "".join(
            f"{n}: {words[n % 10]} {words[n % 7]} meets {words[n % 3]}.\n" for n in range(lines)
        )
    )
    return path


def fingerprint(folder: Path) -> dict[str, str]:
    """Return a hash for every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder with a text to train on."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    return tmp_path


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    """Return a call that runs a command which must fail politely, and gives its one line."""

    def run(*arguments: str) -> str:
        threads = torch.get_num_threads()
        try:
            code = main(list(arguments))
        finally:
            torch.set_num_threads(threads)
        return polite(code, capsys.readouterr().err)

    return run


def polite(code: int, stderr: str) -> str:
    """Check how a mistake is reported, and return the message."""
    assert code == 2, stderr
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("atom: ")
    assert "Traceback" not in lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/done`: a finished run of two steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    command = ["train", *TINY, "--data", str(text), "--directory", str(folder / "runs")]
    command += ["--checkpoint-every", "1"]
    assert main(command) == 0
    (run,) = (folder / "runs").iterdir()
    run.rename(run.with_name("done"))
    return folder


@pytest.fixture
def runs(trained: Path, workplace: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    shutil.copytree(trained / "runs", workplace / "runs")
    return workplace / "runs"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: " ".join(mistake.arguments))
def test_each_mistake_of_the_benchmark_is_answered(
    mistake: Mistake, workplace: Path, complaint: Complaint
) -> None:
    for name, text in FILES.items():
        (workplace / name).write_bytes(text.encode() if isinstance(text, str) else text)
    before = fingerprint(workplace)
    assert mistake.needed in complaint(*mistake.arguments)
    assert fingerprint(workplace) == before


# Names and numbers


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["tarin"], "Did you mean 'train'?"),
        (["train", "--modle", "tiny"], "Did you mean '--model'?"),
        (["train", "--model", "tyny"], "Did you mean 'tiny'?"),
        (["train", *TINY, "--device", "emulted"], "Did you mean 'emulated'?"),
        (["train", *TINY, "--device", "cuda:x"], "cuda:NUMBER"),
        (["train", *TINY, "--device", "xpu:x"], "xpu:NUMBER"),
        (["train", *TINY, "--device", "xpu:99"], "there is no XPU device 99"),
        (["train", "--device", "xpu:99"], "there is no XPU device 99"),  # two peers
        (["train", *TINY, "--device", "emulated:fast"], "4GiB/s"),
        (["serve", "missing"], "'atom export' writes a model for what serves it"),
        (["vllm_serve"], "there is no command 'vllm_serve'; 'atom generate' continues a text"),
        (["download", "org/name"], "atom train --model ORG/NAME"),
        (["Merge-LoRA", "missing"], "Did you mean 'export'?"),
        (["dpo", "recipe.yaml"], "give --objective dpo to 'atom train'"),
        (["join", "a@b"], "'atom train --join RUN@ADDRESS' does that"),
        (["status"], "'atom watch runs/RUN' shows a run"),
        (["train", "many.yaml"], "many.yaml has 3 mistakes: (line 1) there is no key 'modle'"),
        (["bench", "swop"], "Did you mean 'swap'?"),
        (["bench", "repotr"], "Did you mean 'report'?"),
        (["bench"], "atom: NAME is missing."),
        (["train", *TINY, "--device-memory", "lots"], "--device-memory"),
        (["train", *TINY, "--device-memory", "-4MiB"], "--device-memory"),
        (["train", "--steps", "-1"], "--steps must be at least 1, not -1"),
        (["train", "--steps", "ten"], "atom: --steps takes a whole number, not 'ten'."),
        (["train", "--beta", "much"], "atom: --beta takes a number, not 'much'."),
        (["train", "--resume=perhaps"], "atom: --resume takes no value, 'perhaps' neither."),
        (["plan", "tiny", "--gpu"], "atom: --gpu needs a value."),
        (
            ["plan", "tiny", "--gpu", "rtx-3090", "--device-memory", "25GiB"],
            "is more than GeForce RTX 3090 has, 24.0 GiB; leave it out, or choose another --gpu",
        ),
        (["train", "--peers", "0"], "--peers must be at least 1"),
        (["train", "--threads", "0"], "--threads must be at least 1"),
        (["train", "--port", "65536"], "--port must be 0 to 65535"),
        (["train", *TINY, "--seed", "-1"], "--seed must be 0"),
        (["train", "--learning-rate", "-0.1"], "--learning-rate must be above 0"),
        (["train", "--learning-rate", "-1e-3"], "--learning-rate must be above 0"),
        (["train", "--lr", "-1e-3"], "--learning-rate must be above 0"),
        (["train", "--plain", "-1e-3"], "--plain takes no value, '-1e-3' neither"),
        (["train", "--learning-rate", "nan"], "--learning-rate must be above 0"),
        (["train", "--learning-rate", "20"], "above 0 and below 10, not 20"),
        (["train", *TINY, "--dropout", "1.5"], "dropout"),
        (["train", *TINY, "--vocabulary", "3"], "vocabulary"),
        (["train", "--run", "a/b"], "letters, digits"),
        (["train", "--run", "a", "--name", "../b"], "letters, digits"),
        (["train", "--resume"], "--run NAME --resume"),
        (["train", *TINY, "--micro-batch", "3", "--sequences", "8"], "does not divide"),
        (["train", *TINY, "--peers", "2", "--name", "a"], "--name"),
        (["generate"], "CHECKPOINT"),
        (["generate", "."], "is not a checkpoint"),
        (["generate", "missing"], "is not a folder"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--tokens", "0"], "--tokens"),
        (["generate", "x", "--seed", "-1"], "--seed must be 0"),
        (["generate", "x", "--prompt", NO_TEXT], "--prompt is not text in UTF-8"),
        (["generate", "x", "--prompt", ""], "--prompt is empty"),
        (["generate", "x", "--device", "gpu"], "there is no device 'gpu'"),
        (["generate", "x", "--device", "cpu", "--device-memory", "1GiB"], "does not limit"),
        (["generate", "x", "--device-memory", "much"], "--device-memory"),
        (["generate", "x", "--precision", "fp12"], "--precision 'fp12' does not exist"),
        (["generate", "x" * 300], "File name too long; check the path"),
        (["train", *TINY, "--prompt", NO_TEXT], "--prompt is not text in UTF-8"),
        (["train", *TINY, "--threads", "99999"], "--threads must be at most 1024"),
        (["train", *TINY, "--sequences", "99999999999999"], "--sequences must be at most"),
        (["train", *TINY, "--vocabulary", "99999999999"], "--vocabulary must be at most"),
        (["train", *TINY, "--disk", "missing"], "missing is not a folder"),
        (["train", "text.txt"], "to train on a text give --data text.txt"),
        (["data"], "atom data inspect FILES"),
        (["data", "inspect", "text.txt", "--model", "tiny", "--samples", "-1"], "--samples"),
        (["doctor", "--host", "::1"], "is no IPv4 address"),
        (["plan", "tiny", "--micro-batch", "99999999999"], "--micro-batch must be at most"),
        (["plan", "tiny", "--activations", "kep"], "or offload. Did you mean 'keep'?"),
        (["simulate", "tiny", "--upload", "fast"], "--upload 'fast' is not a rate"),
        (["simulate", "tiny", "--context", "0"], "--context must be at least 1"),
        (["simulate", "tiny", "--wire", "int3"], "Did you mean 'int"),
        (["simulate", "tiny", "--host-memory", "much"], "--host-memory"),
        (["simulate", "tiny", "--rounds", "3", "--seed", "-1"], "--seed must be 0"),
        (["simulate", "tiny", "--rounds", "3", "--group", "1"], "groups must be of at least 2"),
        (["simulate", "tiny", "--rounds", "3", "--stay", "inf"], "--stay takes seconds above 0"),
        (["simulate", "tiny", "--rounds", "3", "--away", "nan"], "--away takes seconds above 0"),
        (["bench", "swap", "--peers", "3"], "takes no --peers, which is of network and"),
        (["bench", "depth", "--links", "plain"], "takes no --links, which is of network; leave"),
        (["bench", "churn", "--kills", "0"], "--kills must be at least 1"),
        (["bench", "swap", "--out", "text.txt/x.json"], "not a directory that you may write to"),
        (["bench", "offloaders", "--device-memory", "lots"], "--device-memory"),
        (["dashboard", "me@home"], "me@home holds no run"),
        (["swarm", "status", "me@home"], "me@home holds no list of peers"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_a_wrong_name_or_number(complaint: Complaint, arguments: list[str], needed: str) -> None:
    Path("me@home").mkdir()
    Path("many.yaml").write_text("modle: tiny\nsteps: ten\nlearning_rat: 1\n", encoding="utf-8")
    if arguments[0] == "train" and "tiny" in arguments:
        arguments = [*arguments, "--data", "text.txt"]
    assert needed in complaint(*arguments)
    assert not any(Path("runs").glob("*")), "a mistake leaves nothing behind"


def test_no_command_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "atom train" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["schema"], ["--version"]])
def test_a_reader_that_goes_away_and_a_full_disk(command: list[str]) -> None:
    """Also where so little is printed that only the end of the process would find out."""
    atom = [sys.executable, "-m", "atomtrain.cli.main", *command]
    reading, writing = os.pipe()
    os.close(reading)
    gone = subprocess.run(atom, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(atom, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "No space left on device; make room" in polite(done.returncode, done.stderr)


def test_a_budget_too_small_names_one_that_works(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomtrain.training.setup.fitting._PIECES", (2, 4))  # each is analysed
    command = ["train", *TINY, "--data", "text.txt", "--device", "emulated", "--device-memory"]
    message = complaint(*command, "100KiB")
    assert "layer '" in message
    least = re.search(r"--device-memory to at least (\d+[KM]iB)", message)
    assert least is not None, message
    assert main([*command, least[1]]) == 0
    shutil.rmtree("runs")
    smaller = int(least[1][:-3]) - 1
    assert "no plan fits" in complaint(*command, f"{smaller}{least[1][-3:]}")


# Text


def test_text_that_cannot_be_used(complaint: Complaint) -> None:
    Path("empty.txt").touch()
    Path("short.txt").write_text("In the beginning.")
    Path("binary.txt").write_bytes(bytes(range(256)) * 40)
    Path("folder").mkdir()
    for data, needed in (
        ("missing.txt", "missing.txt"),
        ("no-*.txt", "no-*.txt"),
        ("empty.txt", "empty.txt"),
        ("short.txt", "short.txt"),
        ("binary.txt", "binary.txt"),
        ("folder", "folder"),
    ):
        assert needed in complaint("train", *TINY, "--data", data)
    assert not any(Path("runs").glob("*"))


def test_text_shorter_than_a_sequence(complaint: Complaint) -> None:
    command = ["train", *TINY[:-1], "4000", "--data", "text.txt", "--device-memory", "1GiB"]
    assert "4000" in complaint(*command)


# Runs and checkpoints


def test_resuming_what_is_not_there(complaint: Complaint) -> None:
    command = ["train", "--data", "text.txt", *QUICK, "--resume", "--run", "gone"]
    assert "no checkpoint in" in complaint(*command)
    Path("runs/gone/peer-0/checkpoints").mkdir(parents=True)
    assert "no checkpoint" in complaint(*command)


def test_who_resumes_need_not_know_the_name_of_the_only_peer(complaint: Complaint) -> None:
    for name in ("peer-1", "peer-0a1b2c"):
        Path(f"runs/mine/{name}/checkpoints/step-00000001").mkdir(parents=True)
        message = complaint("train", "--data", "text.txt", *QUICK, "--resume", "--run", "mine")
        if name == "peer-1":  # it is resumed, and what it has saved is damaged
            assert "runs/mine/peer-1/checkpoints" in message
    assert message.endswith("to resume from; give --name peer-0a1b2c or peer-1")
    assert not Path("runs/mine/peer-0").exists()


def test_a_run_is_never_overwritten(complaint: Complaint, runs: Path) -> None:
    before = fingerprint(runs)
    message = complaint("train", *TINY, "--data", "text.txt", "--run", "done")
    assert "already holds a run" in message
    assert "--run done --resume" in message
    assert fingerprint(runs) == before


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (["--model", "demo"], "contradicts"),
        (["--seed", "5"], "contradicts"),
        (["--dropout", "0.5"], "contradicts"),
        (["--vocabulary", "300"], "contradicts"),
    ],
)
def test_resuming_with_other_options(
    complaint: Complaint, runs: Path, options: list[str], needed: str
) -> None:
    before = fingerprint(runs)
    command = ["train", *QUICK, "--data", "text.txt", "--run", "done", "--resume", *options]
    assert needed in complaint(*command)
    assert fingerprint(runs) == before


def test_every_checkpoint_is_damaged(complaint: Complaint, runs: Path) -> None:
    for shard in runs.rglob("shard-00000.safetensors"):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    before = fingerprint(runs)
    message = complaint("train", *QUICK, "--data", "text.txt", "--run", "done", "--resume")
    assert "intact" in message
    assert "step-00000001" in message
    assert "step-00000002" in message
    assert "intact" in complaint("generate", str(runs / "done" / "peer-0"))
    assert fingerprint(runs) == before


def test_who_waits_is_told_how_far_it_is(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    end = Progress.end

    def noted(work: Progress) -> None:
        lines.append(work.line(1.0))
        end(work)

    monkeypatch.setattr(Progress, "end", noted)
    assert main(["evaluate", str(runs / "done"), "--sequences", "3"]) == 0
    assert "evaluating: 3 of 3 sequences (100%), 3 sequences/s, 1 s left" in lines
    assert main(["generate", str(runs / "done"), "--tokens", "4", "--temperature", "0"]) == 0
    assert "generating: 4 of 4 tokens (100%), 4 tokens/s, 1 s left" in lines
    assert main(["prove", "--steps", "1", "--device", "emulated"]) == 0
    for way in ("swapped", "whole"):
        assert f"training {way}: 1 of 1 steps (100%), 1 steps/s, 1 s left" in lines
    capsys.readouterr()


def test_a_run_stands_for_its_only_peer(
    complaint: Complaint, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(runs / "done"), "--sequences", "1"]) == 0
    alone = capsys.readouterr().out
    assert main(["evaluate", str(runs / "done" / "peer-0"), "--sequences", "1"]) == 0
    assert capsys.readouterr().out == alone
    shutil.copytree(runs / "done" / "peer-0", runs / "done" / "peer-1")
    message = complaint("evaluate", str(runs / "done"))
    assert (
        f"has checkpoints of 2 peers; give the folder of one, such as {runs}/done/peer-0" in message
    )
    assert "give a checkpoint or the folder of a run" in complaint("evaluate", str(runs))


def test_a_checkpoint_of_something_else(complaint: Complaint, workplace: Path) -> None:
    from atomtrain.checkpoint import save

    folder = workplace / "runs" / "other" / "peer-0" / "checkpoints"
    save(folder, 1, {"layer": {"w": torch.zeros(3)}}, {"note": "of another program"})
    before = fingerprint(workplace / "runs")
    resume = ["train", *QUICK, "--data", "text.txt", "--run", "other", "--resume"]
    assert "atom train" in complaint(*resume)
    assert "atom train" in complaint("generate", str(folder))
    assert fingerprint(workplace / "runs") == before


@pytest.mark.parametrize("directory", ["text.txt", "text.txt/below", "/proc/atom-runs"])
def test_a_directory_that_cannot_be_written(complaint: Complaint, directory: str) -> None:
    before = Path("text.txt").read_bytes()
    command = ["train", *TINY, "--data", "text.txt", "--directory", directory]
    assert directory in complaint(*command)
    assert directory in complaint(*command, "--run", "mine")
    assert Path("text.txt").read_bytes() == before


FULL_DISK = """
import resource, signal, sys
from atomtrain.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""


def test_the_disk_is_full_when_a_checkpoint_is_written(runs: Path) -> None:
    folder = runs / "done" / "peer-0"
    before = fingerprint(folder / "checkpoints")
    resume = ["train", "--data", "text.txt", "--threads", "1", "--plain", "--run", "done"]
    resume += ["--resume", "--steps", "3"]
    environment = {**os.environ, "MPLCONFIGDIR": str(runs.parent)}
    full = forks.run(
        [sys.executable, "-c", FULL_DISK, "200000", *resume], PATIENCE_S, env=environment
    )
    message = polite(full.returncode, full.stderr)
    assert "could not be written" in message
    assert "earlier checkpoints are intact" in message
    assert fingerprint(folder / "checkpoints") == before
    assert main(resume) == 0, "with room on the disk the run goes on"


# Other peers


@pytest.fixture(scope="module")
def member() -> Iterator[str]:
    """The address of a peer of the run `theirs`, which trains the tiny model."""
    from atomtrain.swarm import Swarm
    from atomtrain.training.config.new_recipe import new_recipe
    from atomtrain.training.config.options import TrainOptions
    from atomtrain.training.setup.peering import manifest_of

    class Zeros:
        def view(self, index: int) -> Lent:
            return Lent()

    class Lent:
        def __enter__(self) -> torch.Tensor:
            return torch.zeros(10)

        def __exit__(self, *_: object) -> None:
            return

    recipe = new_recipe(TrainOptions(model="tiny"))
    config = swarm_config(run="theirs", listen_host="127.0.0.1")
    swarm = Swarm.found(config, manifest_of("theirs", recipe, "{}", "", [10]), Zeros())
    try:
        yield swarm.address
    finally:
        swarm.leave(0.5)


LOCAL = ("--host", "127.0.0.1", "--data", "text.txt", "--threads", "1", "--plain")


def test_joining_a_run_by_a_wrong_name(complaint: Complaint, member: str) -> None:
    message = complaint("train", *LOCAL, "--join", f"ours@{member}")
    assert "trains run 'theirs'" in message


def test_joining_with_another_model(complaint: Complaint, member: str) -> None:
    message = complaint("train", *LOCAL, "--join", f"theirs@{member}", "--model", "demo")
    assert "--model demo contradicts the run 'theirs'" in message


def test_joining_without_or_with_two_names(complaint: Complaint) -> None:
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER_ID}"
    assert "paste the whole line" in complaint("train", *LOCAL, "--join", address)
    two = ["--join", f"a@{address}", "--join", f"b@{address}"]
    assert "which run to join is not clear" in complaint("train", *LOCAL, *two)


def test_a_garbage_address(complaint: Complaint) -> None:
    for garbage in ("hello", "/ip4/127.0.0.1/tcp/4001", "/ip4/1/tcp/x/p2p/y", ""):
        message = complaint("train", *LOCAL, "--join", f"mine@{garbage}")
        assert "is not the address of a peer" in message


def test_nobody_answers(complaint: Complaint) -> None:
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{idle.getsockname()[1]}/p2p/{PEER_ID}"
        message = complaint("train", *LOCAL, "--join", f"mine@{address}")
    assert "no peer answers at" in message
    assert not any(Path("runs").glob("*"))


def test_a_port_in_use(complaint: Complaint) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        message = complaint("train", *TINY, *LOCAL, "--run", "mine", "--port", port)
    assert f"127.0.0.1:{port}" in message
    assert "choose another port" in message


def test_a_host_that_is_not_this_machine(complaint: Complaint) -> None:
    command = ["train", *TINY, "--data", "text.txt", "--run", "mine", "--host"]
    message = complaint(*command, "192.0.2.200")
    assert "192.0.2.200" in message
    assert "--host takes an address of this machine" in message
    assert "nonsense" in complaint(*command, "nonsense")
