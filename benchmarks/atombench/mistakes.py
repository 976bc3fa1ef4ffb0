"""How quickly and how plainly mistakes on the command line are answered.

Each of a list of mistakes is made with the real command, in a process of its own, in an empty
folder with a text to train on. Polite is: exit code 2, exactly one line on standard error that
begins with `atom: ` and says what was expected of it, nothing on standard output, no traceback,
and no new file.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from atombench.common import BenchmarkOptions, description, progress

LIMIT_S = 1.0
"""A person who waits longer looks elsewhere."""
_DEADLINE_S = 60.0
_QUICK_EVERY = 4
_PEER = "12D3KooWJCGm3rTQcJcNZEtzqgqBRGP9Nm5aTDuHkrKyQu1RRpqQ"
_TINY = ("train", "--model", "tiny", "--data", "text.txt")

FILES: dict[str, str | bytes] = {
    "empty.txt": "",
    "recipe.yaml": "modle: tiny\n",
    "others.yaml": "model: tiny\nreport_to: wandb\n",
    "list.yaml": "- tiny\n- text.txt\n",
    "rows.jsonl": '{"question": "Who?"}\n',
    "broken.jsonl": '{"text": \n',
    "tab.yaml": "model: tiny\n\tdata: text.txt\n",
    "bom.yaml": "\ufeffmodle: tiny\n",
    "typed.yaml": "model: tiny\nlearning_rate: 1e-3x\n",
    "alias.yaml": "model: &m tiny\ndata: *n\n",
    "nothing.yaml": "",
    "axolotl.yml": "base_model: tiny\nlearning_rate: fast\n",
    "switch.yml": "base_model: tiny\nadapter: lora\nload_in_8bit: maybe\n",
    "path.yml": "base_model: tiny\ndatasets:\n  - path: 5\n    type: alpaca\n",
    "part.yml": "base_model: tiny\nmicro_batch_size: 1.5\n",
    "target.yml": "base_model: tiny\nadapter: lora\nlora_target: 5\n",
    "qlora.yml": "base_model: tiny\nadapter: qlora\ndatasets:\n  - path: text.txt\n",
    "sft.yaml": "model_name_or_path: tiny\nstage: sft\ntemplate: llama3\ndataset: alpaca_en\n",
    "tune.yaml": "optimizer:\n  _component_: torch.optim.AdamW\n  lr: 3e-4\n",
    "half.json": '{"model_name_or_path": "tiny", "stage": "sft"',
    "half.yaml": "model: tiny\ndata: [text.txt\n",
    "twice.yaml": "model: tiny\nmodel: demo\n",
    "fake.parquet": "no table\n",
    "packed.txt": gzip.compress(b"a text\n" * 200, mtime=0),
    "wide.txt": "a text\n".encode("utf-16"),
    "pointer.txt": "version https://git-lfs.github.com/spec/v1\n",
    "nested.yaml": "model: tiny\ntraining:\n  steps: 10\n",
    "recipe.toml": "model = 'tiny'\nsteps = 10\n",
    "two.yaml": "model: tiny\n---\nmodel: demo\n",
    "latin.yaml": "model: tiny\n# caf\xe9\n".encode("latin-1"),
    "fsdp.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n",
    "zero3.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
    "epochs.yml": "base_model: tiny\nnum_epochs: -3\n",
    "both.yaml": "model_name_or_path: tiny\nstage: sft\nbf16: true\nfp16: true\n",
    "auto.yml": "base_model: tiny\ngradient_accumulation_steps: auto\n",
}
"""What lies in the folder beside the text."""


class Mistake(NamedTuple):
    """A command line that cannot be right, and a part of the answer."""

    arguments: tuple[str, ...]
    needed: str


MISTAKES = (
    Mistake(("tarin",), "Did you mean 'train'?"),
    Mistake(("train", "--modle", "tiny"), "Did you mean '--model'?"),
    Mistake(("train", "--model", "tyny", "--data", "text.txt"), "Did you mean 'tiny'?"),
    Mistake((*_TINY, "--optimizer", "adam"), "Did you mean 'adamw'?"),
    Mistake((*_TINY, "--precision", "fp31"), "Did you mean 'fp32'?"),
    Mistake((*_TINY, "--gradient-dtype", "float23"), "Did you mean 'float32'?"),
    Mistake((*_TINY, "--no-profile", "--profile-again"), "leave one of them out"),
    Mistake((*_TINY, "--schedule", "cosin"), "Did you mean 'cosine'?"),
    Mistake((*_TINY, "--device", "emulted"), "Did you mean 'emulated'?"),
    Mistake((*_TINY, "--device", "emulated:fast"), "4GiB/s"),
    Mistake((*_TINY, "--device-memory", "lots"), "--device-memory"),
    Mistake((*_TINY, "--wire", "int3"), "Did you mean 'int"),
    Mistake((*_TINY, "--metrics", "tensorbord"), "Did you mean 'tensorboard'?"),
    Mistake((*_TINY, "--steps", "ten"), "--steps"),
    Mistake((*_TINY, "--steps", "-1"), "--steps must be at least 1"),
    Mistake((*_TINY, "--peers", "0"), "--peers must be at least 1"),
    Mistake((*_TINY, "--port", "65536"), "--port must be 0 to 65535"),
    Mistake((*_TINY, "--learning-rate", "nan"), "--learning-rate must be above 0"),
    Mistake((*_TINY, "--seed", "-1"), "--seed"),
    Mistake((*_TINY, "--objective", "ppo"), "choose next-token, dpo"),
    Mistake((*_TINY, "--objective", "dpo"), "name its folder with --model"),
    Mistake((*_TINY, "--beta", "0"), "--beta must be above 0"),
    Mistake((*_TINY, "--lora", "rank=4"), "has no part 'rank'"),
    Mistake((*_TINY, "--dropout", "1.5"), "dropout"),
    Mistake((*_TINY, "--micro-batch", "3", "--sequences", "8"), "does not divide"),
    Mistake((*_TINY, "--run", "a/b"), "letters, digits"),
    Mistake(("train", "--resume"), "--run NAME --resume"),
    Mistake(("train", "--run", "gone", "--resume"), "no checkpoint"),
    Mistake(("train", "--model", "tiny", "--data", "missing.txt"), "missing.txt"),
    Mistake(("train", "--model", "tiny", "--data", "empty.txt"), "empty.txt"),
    Mistake(("train", "--model", "tiny", "--data", "org/name"), "datasets:org/name"),
    Mistake(("train", "--model", "tiny", "--data", "stream:"), "is not written as stream:NAME"),
    Mistake((*_TINY, "--directory", "text.txt"), "text.txt"),
    Mistake((*_TINY, "--join", "hello"), "which run to join is not clear"),
    Mistake((*_TINY, "--join", f"a@/ip4/x/tcp/1/p2p/{_PEER}"), "is not the address of a peer"),
    Mistake(("train", "recipe.yaml"), "recipe.yaml:1: there is no key 'modle'"),
    Mistake(("train", "pretrain-smal"), "Did you mean 'pretrain-small'?"),
    Mistake(("plan", "gpt3-13", "--gpu", "h100"), "Did you mean 'gpt3-13b'?"),
    Mistake(("plan", "gpt3-13b", "--gpu", "h10"), "Did you mean 'h100'?"),
    Mistake(("generate", "missing"), "is not a folder"),
    Mistake(("generate", "missing", "--temperature", "-1"), "--temperature"),
    Mistake(("dashboard", "missing"), "there is no folder"),
    Mistake(("bench", "swop"), "Did you mean 'swap'?"),
    Mistake((*_TINY, "--deepspeed", "zero3.json"), "swapping takes its place"),
    Mistake((*_TINY, "--gradient_checkpointing"), "the plan decides this"),
    Mistake((*_TINY, "--load_in_4bit"), "--lora with bits=8 or bits=4"),
    Mistake((*_TINY, "--lora_r", "8"), "--lora r=8,alpha=16"),
    Mistake((*_TINY, "--lora", "r=8,init=pisa"), "must be pissa"),
    Mistake((*_TINY, "--output_dir", "out"), "give --directory"),
    Mistake((*_TINY, "--report_to", "wandb"), "give --metrics"),
    Mistake((*_TINY, "--num_train_epochs", "nan"), "must be above 0"),
    Mistake((*_TINY, "--num_train_epochs", "1", "--steps", "10"), "contradict each other"),
    Mistake((*_TINY, "--per-device-train-batch-size", "0"), "must be at least 1"),
    Mistake((*_TINY, "--gradient-accumulation-steps", "x"), "takes a whole number"),
    Mistake((*_TINY, "--max_seq_length", "0"), "is taken as --context 0"),
    Mistake((*_TINY, "--lr_scheduler_type", "cosin"), "Did you mean 'cosine'?"),
    Mistake((*_TINY, "--bf16", "--fp16"), "contradict each other"),
    Mistake((*_TINY, "--data", "text.txt:0"), "a weight is a number above 0"),
    Mistake(("train", "--model", "tiny", "--data", "rows.jsonl"), "a row needs messages"),
    Mistake(("train", "--model", "tiny", "--data", "broken.jsonl"), "not JSON"),
    Mistake(("train", "others.yaml"), "others.yaml:2: report_to is not a key here"),
    Mistake(("train", "list.yaml"), "a list of 'key: value' lines"),
    Mistake(("import", "missing.yml"), "there is no file missing.yml"),
    Mistake(("import", "list.yaml"), "it has no 'key: value' lines"),
    Mistake(("export", "missing", "out"), "is not a folder"),
    Mistake(("evaluate", "missing"), "is not a folder"),
    Mistake(("report", "missing"), "holds no events"),
    Mistake(("prove", "--device", "toaster"), "there is no device 'toaster'"),
    Mistake(("completion", "tcsh"), "Did you mean 'zsh'?"),
    Mistake(("simulate",), "MODEL is missing"),
    Mistake((*_TINY, "--lr", "1e-3x"), "--lr takes a number"),
    Mistake((*_TINY, "--lr", "3e\u22124"), "looks like a minus"),
    Mistake((*_TINY, "\u2013steps", "5"), "type --steps"),
    Mistake((*_TINY, "\u2014steps=5"), "type --steps"),
    Mistake((*_TINY, "--steps", "1e3"), "takes a whole number"),
    Mistake((*_TINY, "-steps", "5"), "Did you mean '--steps'?"),
    Mistake((*_TINY, "--host", "localhost:80"), "is no IPv4 address"),
    Mistake(("--model", "tiny", "train"), "the command comes first"),
    Mistake(("atom", "train"), "stands there twice"),
    Mistake(("train", "."), ". is a folder"),
    Mistake(("train", "text.txt"), "give --data text.txt"),
    Mistake(("train", "--model", "text.txt", "--data", "tiny"), "tiny does not exist"),
    Mistake(("train", "tab.yaml"), "tab.yaml:2: not YAML"),
    Mistake(("train", "bom.yaml"), "bom.yaml:1: there is no key 'modle'"),
    Mistake(("train", "typed.yaml"), "typed.yaml:2: learning_rate must be a number"),
    Mistake(("train", "alias.yaml"), "alias.yaml:2: not YAML (found undefined alias"),
    Mistake(("train", "nothing.yaml"), "nothing.yaml is empty"),
    Mistake(("train", "--model", "tiny", "--data", "fake.parquet"), "is not parquet"),
    Mistake(("train", "--model", "tiny", "--data", "packed.txt"), "gunzip"),
    Mistake(("train", "--model", "tiny", "--data", "wide.txt"), "iconv -f UTF-16"),
    Mistake(("train", "--model", "tiny", "--data", "pointer.txt"), "git lfs pull"),
    Mistake(("train", "--model", "tiny", "--data", "https://a.org/b.txt"), "download it"),
    Mistake(("import", "axolotl.yml"), "learning_rate must be a number"),
    Mistake(("import", "switch.yml"), "load_in_8bit must be true or false"),
    Mistake(("import", "path.yml"), "path must be the name of a data set or a file"),
    Mistake(("import", "recipe.yaml"), "none of its keys is one of theirs"),
    Mistake(("import", "."), ". is a folder"),
    Mistake(("import", "alias.yaml"), "has aliases"),
    Mistake(("plan", "tiny", "--machine", "gone.json"), "--machine gone.json"),
    Mistake(("plan", "tiny", "--gpu", "RTX 4090"), "Did you mean 'rtx-4090'?"),
    Mistake(("dashboard", "text.txt"), "there is no folder text.txt"),
    Mistake((*_TINY, "--device", "gpu"), "Did you mean 'cuda'?"),
    Mistake((*_TINY, "--device", "0"), "Did you mean 'cuda:0'?"),
    Mistake((*_TINY, "--device", "mps"), "Did you mean 'cpu'?"),
    Mistake((*_TINY, "--device-memory", "8"), "write the unit, such as 8GiB"),
    Mistake((*_TINY, "--join", "a@192.0.2.1:4001"), "is not the address of a peer"),
    Mistake(("train", "--config", "recipe.yaml"), "atom train FILE"),
    Mistake((*_TINY, "--adam_beta2", "0.95"), "AdamW has betas of 0.9 and 0.95 here"),
    Mistake((*_TINY, "--save_total_limit", "2"), "the last two checkpoints are kept"),
    Mistake((*_TINY, "--dataloader_num_workers", "4"), "data are read ahead"),
    Mistake((*_TINY, "--warmup_ratio", "3"), "--warmup-ratio must be at least 0 and below 1"),
    Mistake(("import", "part.yml"), "micro_batch_size must be a whole number, not 1.5"),
    Mistake(("import", "target.yml"), "lora_target must be a list of names"),
    Mistake(("import", "half.json"), "cannot be read as YAML"),
    Mistake(("train", "half.yaml"), "half.yaml:3: not YAML"),
    Mistake(("train", "twice.yaml"), "twice.yaml:2: model stands in line 1 already"),
    Mistake(("train", "qlora.yml"), "atom import qlora.yml --out recipe.yaml"),
    Mistake(("train", "sft.yaml"), "is a recipe of axolotl or LLaMA-Factory"),
    Mistake(("import", "tune.yaml"), "is a recipe of torchtune"),
    Mistake(("chat", "missing"), "Did you mean 'generate'?"),
    Mistake(("launch", "train.py"), "Did you mean 'train'?"),
    Mistake(("preprocess", "axolotl.yml"), "Did you mean 'data'?"),
    Mistake(("merge", "missing"), "Did you mean 'export'?"),
    Mistake(("estimate-memory", "tiny"), "Did you mean 'plan'?"),
    Mistake(("train", "epochs=3"), "write --epochs 3"),
    Mistake((*_TINY, "epochs=3", "batch_size=2"), "write --batch-size 2"),
    Mistake((*_TINY, "--stage", "sft"), "give --objective"),
    Mistake((*_TINY, "--template", "llama3"), "the model's own template is used"),
    Mistake((*_TINY, "--quantization_bit", "4"), "--lora with bits=8 or bits=4"),
    Mistake((*_TINY, "--adapter", "qlora"), "--lora r=8,alpha=16"),
    Mistake((*_TINY, "--lora_target_modules", "q_proj"), "--lora r=8,alpha=16"),
    Mistake((*_TINY, "--val_set_size", "0.05"), "give --validation"),
    Mistake((*_TINY, "--wandb_entity", "me"), "give --metrics"),
    Mistake((*_TINY, "--overwrite_output_dir"), "a run is never overwritten"),
    Mistake((*_TINY, "--evaluation_strategy", "steps"), "give --evaluate-every N"),
    Mistake((*_TINY, "--mixed_precision", "bf16"), "give --precision"),
    Mistake((*_TINY, "--nnodes", "2"), "other machines join with --join"),
    Mistake((*_TINY, "--gpus", "2"), "give --device, such as cuda:0"),
    Mistake((*_TINY, "--cpu_offload"), "swapping takes its place"),
    Mistake((*_TINY, "--gradient_clip_val", "1"), "give --clip-norm"),
    Mistake((*_TINY, "--use_gradient_checkpointing", "unsloth"), "the plan decides this"),
    Mistake((*_TINY, "--block_size", "1024"), "give --context"),
    Mistake((*_TINY, "--no_cuda"), "give --device cpu"),
    Mistake(("train", "--model", "./llama", "--data", "text.txt"), "there is no folder llama"),
    Mistake(("train", "nested.yaml"), "nested.yaml:2: there is no key 'training'"),
    Mistake(("train", "recipe.toml"), "a list of 'key: value' lines"),
    Mistake(("train", "two.yaml"), "two.yaml:2: not YAML (but found another document)"),
    Mistake(("train", "latin.yaml"), "latin.yaml is not text in UTF-8"),
    Mistake(("train", "fsdp.yaml"), "fsdp.yaml is a configuration of accelerate"),
    Mistake(("train", "recipe.yaml", "others.yaml"), "Beside options it takes RECIPE only"),
    Mistake(("train", "-c", "recipe.yaml"), "Options have two dashes and a whole name"),
    Mistake(("import", "zero3.json"), "zero3.json is a configuration of DeepSpeed"),
    Mistake(("import", "https://a.org/recipe.yml"), "is an address; download the recipe"),
    Mistake(("import", "epochs.yml"), "epochs.yml: --epochs must be above 0"),
    Mistake(("import", "both.yaml"), "both.yaml: --fp16 and --bf16 contradict each other"),
    Mistake(("import", "auto.yml"), "must be a whole number, not 'auto'"),
    Mistake(("import", "qlora.yml", "--out", "gone/recipe.yaml"), "there is no folder"),
    Mistake((*_TINY, "--lora", "r=8", "alpha=16"), "have commas between them and no spaces"),
    Mistake((*_TINY, "--metrics", "wandb,tensorboard"), "Give --metrics once for each"),
    Mistake((*_TINY, "--tokenizer_name", "gpt2"), "the model's own tokenizer is used"),
    Mistake((*_TINY, "--grad_clip", "1"), "give --clip-norm"),
    Mistake((*_TINY, "--max_memory", "8GiB"), "give --device-memory"),
    Mistake((*_TINY, "--validation", "0.1"), "--validation 0.1 is a share, not a file"),
    Mistake(("train", "--join", "a@/ip4/192.0.2.1/tcp/1"), "is not the address of a peer"),
    Mistake(
        ("train", "--join", "a@/ip4/192.0.2.1/tcp/1/p2p/12D3KooW..."), "paste the whole line that"
    ),
    Mistake(("generate", "text.txt"), "text.txt is not a folder"),
)


class Answer(NamedTuple):
    """What came of a mistake."""

    exit_code: int
    stdout: str
    stderr: str
    s: float
    left: tuple[str, ...]
    """Files that were not there before."""

    def is_polite(self, mistake: Mistake) -> bool:
        """Return whether it was answered as it should be."""
        lines = self.stderr.splitlines()
        return (
            self.exit_code == 2
            and len(lines) == 1
            and lines[0].startswith("atom: ")
            and mistake.needed in lines[0]
            and not self.stdout
            and not self.left
        )


def run(options: BenchmarkOptions) -> dict[str, Any]:
    """Make every mistake (with `quick` every fourth) once; return the result."""
    mistakes = MISTAKES[::_QUICK_EVERY] if options.quick else MISTAKES
    rows: list[dict[str, Any]] = []
    for mistake in mistakes:
        answer = make(mistake)
        said = answer.stderr.strip() or answer.stdout.strip()
        rows.append(
            {
                "arguments": " ".join(mistake.arguments),
                "answer": said.splitlines()[-1] if said else "",
                "answer_s": answer.s,
                "exit_code": answer.exit_code,
                "polite": answer.is_polite(mistake),
            }
        )
        progress(f"{answer.s:5.2f} s  {rows[-1]['arguments']}: {rows[-1]['answer'][:100]}")
    times_s = sorted(row["answer_s"] for row in rows)
    return {
        **description(),
        "mistakes": len(rows),
        "polite": sum(row["polite"] for row in rows),
        "within_limit": sum(time_s <= LIMIT_S for time_s in times_s),
        "limit_s": LIMIT_S,
        "median_s": times_s[len(times_s) // 2],
        "slowest_s": times_s[-1],
        "help_s": _help_s(),
        "import_s": import_s(),
        "rows": rows,
    }


def make(mistake: Mistake) -> Answer:
    """Make a mistake with the real command, in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (f"{n}: a peer meets another peer in round {n % 7}.\n" for n in range(300))
        (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
        for file, text in FILES.items():
            content = text.encode() if isinstance(text, str) else text
            (folder / file).write_bytes(content)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / ".cache")}
        before = _files(folder)
        started_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "atomtrain.cli.main", *mistake.arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        took_s = time.perf_counter() - started_s
        left = tuple(sorted(_files(folder) - before))
    return Answer(done.returncode, done.stdout, done.stderr, took_s, left)


def _files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if ".cache" not in path.parts}


def _help_s() -> float:
    """Return the least of three times that `atom --help` takes."""
    command = [sys.executable, "-m", "atomtrain.cli.main", "--help"]
    return min(_process_s(command) for _ in range(3))


def import_s() -> float:
    """Return the least of three times that `import atomtrain` takes, the interpreter's left out."""
    code = "import time; s = time.perf_counter(); import atomtrain; print(time.perf_counter() - s)"
    return min(float(_output([sys.executable, "-c", code])) for _ in range(3))


def _process_s(command: list[str]) -> float:
    started_s = time.perf_counter()
    _output(command)
    return time.perf_counter() - started_s


def _output(command: list[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True
    ).stdout
