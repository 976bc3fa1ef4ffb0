"""No code comes from a model's folder, a run, a checkpoint or a recipe: nothing leaves a mark."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atomtrain.checkpoint import open_checkpoint, save
from atomtrain.cli.main import main
from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.options import TrainOptions
from tests.support.hostile import CODE, EVIL, mark, pickled, write_stub
from tests.support.hugging_face_models import LLAMA, tokenizer, write_model, write_text
from tests.support.swarm_configs import swarm_config

pytest.importorskip("transformers")
COMMANDS = """
import contextlib, io, json, sys
from atomtrain.cli.main import main
told = []
for arguments in json.load(sys.stdin):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        sys.stdin = io.StringIO("y\\n" * 9)
        code = main(arguments)
    told.append([code, errors.getvalue()])
print(json.dumps(told))
"""
PATIENCE_S = 300
SMALL = [
    "--host", "127.0.0.1", "--device", "cpu", "--context", "16", "--sequences", "2", "--steps", "1",
    "--plain", "--no-profile", "--threads", "1",
]  # fmt: skip

Environment = dict[str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "honest"
    write_model(folder)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return write_stub(tmp_path / "stub")


def commands(environment: Environment, *arguments: list[str]) -> list[tuple[int, str]]:
    """Run commands in one process that has the stub; return exit codes and errors."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], input=json.dumps(arguments), env=environment,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(code, told) for code, told in json.loads(done.stdout.splitlines()[-1])]


def changed(model: Path, target: Path, **changes: Any) -> Path:
    """Return a copy of the model's folder with another configuration."""
    shutil.copytree(model, target)
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return target


def test_the_stub_would_tell(model: Path, tmp_path: Path, environment: Environment) -> None:
    """What the other tests say never happens does happen where transformers is used directly."""
    changed(model, tmp_path / "evil", _attn_implementation=EVIL)
    script = (
        "import sys\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "evil")], env=environment,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert mark(environment).startswith(f"get_kernel ('{EVIL}',)")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention": ({"_attn_implementation": EVIL}, "choose one, or remove the key"),
    "attention, public name": ({"attn_implementation": EVIL}, "it may be eager, sdpa"),
    "attention of a part": (
        {"attn_implementation": {"": "eager", "text_config": EVIL}}, "it may be eager, sdpa",
    ),
    "attention of a nested part": ({"text_config": {"attn_implementation": EVIL}}, EVIL),
    "attention, internal": ({"_attn_implementation_internal": EVIL}, EVIL),
    "attention of a layer": ({"per_layer_config": {"0": {"attn_implementation": EVIL}}}, EVIL),
    "attention, paged": ({"attn_implementation": f"paged|{EVIL}"}, "it may be eager, sdpa"),
    "flash attention": ({"attn_implementation": "flash_attention_2"}, "it may be eager, sdpa"),
    "experts": ({"experts_implementation": "deepgemm"}, "it may be eager, grouped_mm, batched_mm"),
    "a table of names": (
        {"attribute_map": {"x": "_attn_implementation_internal"}, "x": EVIL},
        "'attribute_map', which is a name of transformers' own",
    ),
    "a type that is a function": ({"dtype": "load"}, "says dtype 'load'"),
    "a type, old name": ({"torch_dtype": "hub"}, "says torch_dtype 'hub'"),
    "quantised otherwise": ({"quantization_config": {"quant_method": EVIL}}, "is not read here"),
    "quantised in a part": (
        {"text_config": {"quantization_config": {"quant_method": "fp4"}}}, "'fp4', which is not",
    ),
    "a backbone of a hub": ({"vision_config": {"backbone": "evil-org/evil"}}, "not fetched"),
    "a foreign part": (
        {"vision_config": {"model_type": "timm_wrapper", "architecture": "hf-hub:evil-org/evil"}},
        "'timm_wrapper', which is not built here",
    ),
    "layers": ({"num_hidden_layers": 10**7}, "a whole number from 0 to 4096"),
    "a negative size": ({"vocab_size": -5}, "says vocab_size '-5'"),
    "a size that is none": ({"hidden_size": 1e9}, "says hidden_size '1000000000.0'"),
}  # fmt: skip
HARMLESS: dict[str, dict[str, Any]] = {
    "code for the model": {
        "auto_map": {
            "AutoConfig": "evil.Evil", "AutoModelForCausalLM": f"{EVIL}--evil.Evil",
            "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"],
        },
        "trust_remote_code": True,
    },
    "kernels": {"use_kernels": True, "kernel_config": {"kernel_mapping": {"RMSNorm": EVIL}}},
    "names": {"_name_or_path": EVIL, "name_or_path": EVIL, "base_model_name_or_path": EVIL},
    "a whole object": {"__dict__": {"_attn_implementation_internal": EVIL}, "__class__": "evil"},
    "pipelines": {"custom_pipelines": {"evil": {"impl": "evil.Evil", "pt": ["Evil"]}}},
    "the usual attention": {"attn_implementation": "eager", "_experts_implementation": "eager"},
}  # fmt: skip


def test_a_folder_brings_no_code(model: Path, tmp_path: Path, environment: Environment) -> None:
    asked = []
    for index, (changes, _) in enumerate(REFUSED.values()):
        asked.append(["generate", str(changed(model, tmp_path / f"no-{index}", **changes))])
    for index, changes in enumerate(HARMLESS.values()):
        folder = changed(model, tmp_path / f"yes-{index}", **changes)
        (folder / "evil.py").write_text(CODE)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**settings, "auto_map": auto_map})
        )
        asked.append(["generate", str(folder), "--tokens", "1"])
    deep = tmp_path / "deep"
    shutil.copytree(model, deep)
    (deep / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    asked.append(["generate", str(deep)])
    told = commands(environment, *asked)
    assert mark(environment) == ""
    for name, (_, expected), (code, line) in zip(REFUSED, REFUSED.values(), told, strict=False):
        assert (code, line.count("\n")) == (2, 1), f"{name}: {line}"
        assert expected in line, name
    for name, (code, line) in zip(HARMLESS, told[len(REFUSED) : -1], strict=True):
        assert code == 0, f"{name}: {line}"
    assert told[-1][0] == 2
    assert "nested too deep" in told[-1][1]


def test_the_command_itself_refuses(model: Path, tmp_path: Path, environment: Environment) -> None:
    folder = str(changed(model, tmp_path / "evil", _attn_implementation=EVIL))
    done = subprocess.run(
        [sys.executable, "-m", "atomtrain.cli.main", "train", "--plain", "--model", folder],
        env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    others = commands(environment, *([name, folder] for name in ("plan", "generate", "evaluate")))
    for code, told in ((done.returncode, done.stderr), *others):
        assert (code, told.count("\n")) == (2, 1), told
        assert EVIL in told
    assert mark(environment) == ""


def test_pickled_weights_are_not_read(
    model: Path, tmp_path: Path, environment: Environment
) -> None:
    beside, alone, named = (changed(model, tmp_path / f"evil-{n}") for n in range(3))
    for folder in (beside, alone, named):
        for name in ("pytorch_model.bin", "adapter_model.bin", "model.pt", "optimizer.pth"):
            (folder / name).write_bytes(pickled())
    for folder in (alone, named):
        (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (named / "model.safetensors.index.json").write_text(json.dumps(index))
    told = commands(
        environment,
        *(["generate", str(folder), "--tokens", "1"] for folder in (beside, alone, named)),
    )
    assert mark(environment) == ""
    assert [code for code, _ in told] == [0, 2, 2]
    assert "a pickle, which may run any code" in told[1][1]
    assert "not a whole safetensors file" in told[2][1]


def test_weights_that_are_no_numbers_are_told(model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    damaged = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
    ((code, told),) = commands(write_stub(tmp_path / "stub"), ["generate", str(folder)])
    assert (code, told.count("\n")) == (2, 1), told
    assert "its weights are damaged" in told


def test_older_tokenizers_bring_no_code(
    model: Path, tmp_path: Path, environment: Environment
) -> None:
    """Python asks whether to run a tokenizer's code; here even a yes does not."""
    folder = changed(model, tmp_path / "evil")
    made = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    words = {**made["vocab"], "<|endoftext|>": len(made["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(words))
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in made["merges"])
    (folder / "merges.txt").write_text("\n".join(pairs))
    (folder / "evil.py").write_text(CODE)
    settings = {
        "eos_token": "<|endoftext|>", "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": settings["auto_map"]}))
    known = shutil.copytree(folder, tmp_path / "known")
    settings["tokenizer_class"] = "GPT2Tokenizer"
    (known / "tokenizer_config.json").write_text(json.dumps(settings))
    _, (code, told) = commands(
        environment, *(["generate", str(made), "--tokens", "1"] for made in (folder, known))
    )
    assert mark(environment) == ""
    assert code == 0, told


def test_a_template_brings_no_code(model: Path, tmp_path: Path, environment: Environment) -> None:
    folder = changed(model, tmp_path / "evil")
    leaves = f"open('{environment['HOSTILE_MARK']}', 'w').write('template')"
    template = (
        "{{ cycler.__init__.__globals__['__builtins__']['exec'](" + json.dumps(leaves) + ") }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    inspect = ["data", "inspect", str(tmp_path / "rows.jsonl"), "--model", str(folder)]
    ((code, told),) = commands(environment, inspect)
    assert (code, told.count("\n")) == (2, 1)
    assert "the chat template refuses it" in told
    assert mark(environment) == ""


def test_a_recipe_file_brings_no_code(tmp_path: Path, environment: Environment) -> None:
    command = f"echo recipe > {environment['HOSTILE_MARK']}"
    files = []
    for number, kind in enumerate(("object/apply", "name")):
        files.append(tmp_path / f"evil-{number}.yaml")
        files[-1].write_text(f"steps: !!python/{kind}:os.system [{json.dumps(command)}]\n")
    for code, told in commands(environment, *(["train", str(file), "--plain"] for file in files)):
        assert (code, told.count("\n")) == (2, 1)
    assert mark(environment) == ""


def test_a_checkpoint_brings_no_code(
    model: Path, tmp_path: Path, environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "text.txt")
    runs = tmp_path / "runs"
    train = [
        "train", "--model", str(model), "--data", str(text), "--directory", str(runs),
        "--run", "mine", *SMALL,
    ]  # fmt: skip
    assert main(train) == 0, capsys.readouterr().err
    folder = runs / "mine" / "peer-0"
    honest = open_checkpoint(folder)
    shards = {
        name: {key: tensor.clone() for key, tensor in tensors.items()}
        for name, tensors in honest.shards()
    }
    asked: list[list[str]] = []
    for number, changes in enumerate(
        ({"_attn_implementation": EVIL}, {"attribute_map": {"x": "y"}})
    ):
        meta = json.loads(json.dumps(honest.meta))
        meta["recipe"]["sizes"]["config"].update(changes)
        theirs = shutil.copytree(runs, tmp_path / f"runs-{number}")
        evil = theirs / "mine" / "peer-0"
        save(evil / "checkpoints", 9, shards.items(), meta, honest.texts)
        asked += [
            ["generate", str(evil), "--tokens", "1"],
            ["export", str(evil), str(tmp_path / "exported")],
            ["train", "--data", str(text), "--directory", str(theirs), "--run", "mine",
             "--resume", "--plain", "--host", "127.0.0.1"],
        ]  # fmt: skip
    told_of_each = commands(environment, *asked)
    assert mark(environment) == ""
    for code, told in told_of_each:
        lines = [line for line in told.splitlines() if "going on alone" not in line]
        assert (code, len(lines)) == (2, 1), told
    assert not (tmp_path / "exported").exists()


@contextmanager
def founded(sizes: dict[str, Any]) -> Iterator[str]:
    """A run whose founder says this of the model; yields what others join."""
    from atomtrain.swarm import Swarm
    from atomtrain.swarm.membership.config import Manifest

    class Zeros:
        @contextmanager
        def view(self, index: int) -> Iterator[torch.Tensor]:
            yield torch.zeros(10)

    recipe = {**new_recipe(TrainOptions(model="tiny")).to_json(), "sizes": sizes}
    payload = {"recipe": recipe, "tokenizer": tokenizer().to_json(), "separator": "<|endoftext|>"}
    config = swarm_config(run="theirs", listen_host="127.0.0.1")
    swarm = Swarm.found(config, Manifest("theirs", (10,), payload), Zeros())
    try:
        yield f"theirs@{swarm.address}" if "@" not in swarm.address else swarm.address
    finally:
        swarm.leave(0.5)


SIZES = {"config": LLAMA, "vocabulary": 300, "context": 128, "width": 32, "files": {}}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({**SIZES, "config": {**LLAMA, "_attn_implementation": EVIL}}, EVIL),
        ({**SIZES, "files": {"../evil.py": CODE}}, "'../evil.py'"),
        ({**SIZES, "config": {**LLAMA, "num_hidden_layers": 10**7}}, "from 0 to 4096"),
    ],
    ids=["attention", "a file elsewhere", "layers"],
)
def test_a_founder_brings_no_code(
    sizes: dict[str, Any], expected: str, tmp_path: Path, environment: Environment
) -> None:
    done = joined(sizes, tmp_path, environment)
    assert mark(environment) == ""
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "what the founder of run 'theirs' says cannot be used" in done.stderr
    assert expected in done.stderr
    assert not (tmp_path / "evil.py").exists()


def test_who_joins_is_told_of_memory(tmp_path: Path, environment: Environment) -> None:
    done = joined(SIZES, tmp_path, environment, "--host-memory", "100KiB")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "of host memory, 100.0 KiB are there" in done.stderr


def joined(
    sizes: dict[str, Any], place: Path, environment: Environment, *options: str
) -> subprocess.CompletedProcess[str]:
    """Join, by the real command, a run whose founder says this of the model."""
    text = write_text(place / "text.txt")
    with founded(sizes) as address:
        return subprocess.run(
            [sys.executable, "-m", "atomtrain.cli.main", "train", "--join", address, "--host",
             "127.0.0.1", "--data", str(text), "--plain", "--threads", "1", *options],
            env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            cwd=place,
        )  # fmt: skip
