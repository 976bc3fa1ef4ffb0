"""Where the documentation's commands run: a folder with what they name, and how they are shrunk.

The tables say all that differs from what a user would type. A command that can run here does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from atombench import forks
from atomtrain.events import EventTail
from tests.support.doc_commands import ROOT, blocks
from tests.support.hugging_face_models import SENTENCE, UNTIED, write_model
from tests.support.image_models import write_chats, write_llava
from tests.support.train_processes import write_text
from tests.support.waiting import PATIENCE_S

ATOM = [sys.executable, "-m", "atomtrain.cli.main"]

OPTIONS: dict[str, tuple[str, ...]] = {
    "train": (
        "--device", "emulated:4GiB/s", "--device-memory", "12MiB", "--host-memory", "4GiB",
        "--context", "32", "--sequences", "4", "--steps", "4", "--evaluate-every", "100",
        "--checkpoint-every", "100", "--host", "127.0.0.1", "--threads", "1", "--no-profile",
        "--plain",
    ),
    "generate": ("--tokens", "3"),
    "plan": ("--context", "32", "--tokens-per-step", "64", "--gpu", "rtx-3090"),
    "init": ("--yes",),
    "bench": ("--quick",),
    "simulate": ("--context", "64",),
    "dashboard": ("--port", "0"),
}  # fmt: skip
"""Put behind every command of this name; what comes last counts. Small, without a GPU, without
questions, and reachable from this machine only."""

WORDS: dict[str, dict[str, str]] = {
    # A model that is there, and small.
    "*": {
        "gpt3-small": "tiny", "gpt3-2.7b": "tiny", "gpt3-xl": "tiny", "gpt3-13b": "tiny",
        "gpt3-175b": "tiny",
        # An address at which a peer is: the one that this test starts.
        "mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW...": "ADDRESS",
        "mine@/ip4/192.0.2.1/tcp/4001/p2p/"
        "12D3KooWJCGm3rTQcJcNZEtzqgqBRGP9Nm5aTDuHkrKyQu1RRpqQ": "ADDRESS",
        # A disk that is there, and a port that is free.
        "/mnt/nvme": "disk", "4001": "0",
    },
    "simulate": {"1000": "6", "600": "4"},
    # Peers, each of which starts two processes.
    "bench": {"4": "2"},
}  # fmt: skip
"""Words of commands that are replaced, by the command's name; `*` is any."""

FRESH: set[tuple[str, str]] = {
    ("README.md", "train --run mine --wire int4 --run-key key"),
    ("fine-tune-7b.md", "train finetune-7b-24gb --model models/llama-7b --data 'books/*.txt' "
     "--run mine"),
    ("join.md", "train --run mine --data books/ --port 4001"),
}  # fmt: skip
"""Commands that start a run of a name that the page, or this test, has used already: the folder of
its first peer is removed before."""

NOT_RUN: dict[tuple[str, str], str] = {
    ("network.md", "bench network --json --out network.json"):
        "20 minutes, as root; tests/integration/benchmarks has the quick one",
    ("network.md", "bench network --quick"):
        "as root; tests/integration/benchmarks/test_network_shaped.py runs it",
    ("scale.md", "bench simulation --json"):
        "half a minute, quick or not; test_simulation_tables.py makes its tables",
    ("join.md", "train --join lan"):
        "asks the whole local network; test_swarm_ways_in.py does it among its own",
}  # fmt: skip
"""Commands that cannot run here, and why."""

NAMESPACES = "bench network"
"""Commands that begin so make network namespaces: a test of their own runs them, as root."""

NOT_OURS = {
    "pip": "installs; tests/unit/house/test_packaging.py installs the wheel",
    "python3": "makes an environment",
    ".": "enters an environment",
    "podman": "builds and runs containers",
    "make": "the Makefile's targets: the tests themselves, and the demo",
    "ssh": "another machine",
    "llama-cli": "another program; the page says that it was compared by hand",
    "vllm": "needs a GPU; the page says that it was not run",
    "lm_eval": "another harness, with many dependencies; the page says how it was run",
}
"""Other programs in the pages' shell blocks, and why they are not run."""

PYTHON_NOT_RUN = {
    "swarm.md": "two peers in turn; tests/integration/swarm/test_swarm_in_process.py is the same",
}
"""Pages whose Python does not run, and why. Sessions (`>>>`) are run by
tests/unit/training/test_trainer.py."""

PYTHON_WORDS = {
    'device="cuda"': 'device="emulated"', 'device="cuda:0,cuda:1"': 'device="emulated,emulated"',
    "131072": "1024", "131073": "1025",
    '"/mnt/nvme"': '"disk"',
}  # fmt: skip
"""Parts of Python that are replaced."""

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prepare(folder: Path) -> None:
    """Write what the pages name: texts, rows, pairs, models, a key, a folder for disk."""
    for name in ("smollm2-135m", "llama-7b", "llama-70b"):
        write_model(folder / "models" / name, {**UNTIED, "intermediate_size": 64})
        (folder / "models" / name / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("books", "disk"):
        (folder / name).mkdir()
    write_text(folder / "books" / "one.txt")
    words = SENTENCE.split()
    chats, pairs = [], []
    for n in range(40):
        asked = {"role": "user", "content": " ".join(words[n % 7 : n % 7 + 3])}
        answer, other = (
            {"role": "assistant", "content": " ".join(words[n % k : n % k + 6])} for k in (5, 9)
        )
        chats.append(json.dumps({"messages": [asked, answer]}))
        pairs.append(json.dumps({"prompt": [asked], "chosen": [answer], "rejected": [other]}))
    write_llava(folder / "models" / "llava", layers=1, patch=8)
    write_chats(folder / "photos", question="?")
    (folder / "chats.jsonl").write_text("\n".join(chats))
    (folder / "pairs.jsonl").write_text("\n".join(pairs))
    reviews = [json.dumps({"text": words[n % 5], "label": n % 5 > 2}) for n in range(40)]
    (folder / "reviews.jsonl").write_text("\n".join(reviews))
    (folder / "key").write_text("a secret that only these peers have\n")


def write_recipe(folder: Path) -> None:
    """Write the recipe that docs/recipes.md shows."""
    [recipe] = [b.text for b in blocks(ROOT / "docs" / "recipes.md") if b.language == "yaml"]
    (folder / "mine.yaml").write_text(recipe.replace("gpt3-small", "tiny"))


def shrunk(words: tuple[str, ...], address: str) -> list[str]:
    """Return a command line with the tables applied."""
    name, *rest = words
    changes = {**WORDS["*"], **WORDS.get(name, {}), "ADDRESS": address}
    given = [changes.get(changes.get(word, word), changes.get(word, word)) for word in rest]
    options = list(OPTIONS.get(name, ()))
    if name == "train":
        if not {"--model", "--join", "--resume"} & set(rest) and not _is_recipe(rest):
            options += ["--model", "tiny"]
        if not {"--data", "--resume"} & set(rest) and not _is_recipe(rest):
            options += ["--data", "books/"]
        if _is_recipe(rest) and rest[0] not in ("finetune-7b-24gb", "lora-70b-24gb"):
            options += ["--model", "tiny"]
    return [name, *given, *options]


def _is_recipe(rest: list[str]) -> bool:
    return bool(rest) and not rest[0].startswith("-")


class Founder:
    """A peer of a run, in a process of its own, that others join until the context is left."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        command = shrunk(("train", "--run", "mine", "--name", name), "")
        command += ["--steps", "1000000", "--device", "emulated:4MiB/s"]
        self._log = (folder / "founder.log").open("w+")
        self._process = forks.Popen(
            [*ATOM, *command, "--hidden"], cwd=folder, stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> Founder:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._log.close()

    def address(self) -> str:
        """Return what others give to `--join`, as soon as the peer has told it."""
        tail = EventTail(self._folder / "runs" / "mine" / self._name / "events.jsonl")
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s and self._process.poll() is None:
            for event in tail.read():
                if event["event"] == "run_started":
                    return str(event["join_address"])
            time.sleep(0.05)
        self._log.seek(0)
        raise AssertionError(f"the founder told no address: {self._log.read()}")


def python_names(page: str) -> dict[str, Any]:
    """Return a model, batches and what else a page's Python takes for granted."""
    import torch
    from torch import nn

    import atomtrain
    from atomtrain.models import GPT, GPTConfig

    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "atomtrain": atomtrain}
    if page == "analysis.md":

        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
                self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                value = self.embed(ids)
                for block in self.blocks:
                    value = block(value)
                return self.head(value)

        names["model"], names["example"] = Named(), {"ids": torch.randint(32, (2, 8))}
        names["loss"] = lambda output: output.square().mean()
        return names
    config = GPTConfig(layers=2, width=32, heads=2, head_width=16, vocabulary=64, context=16)
    ids = torch.randint(64, (2, 17))
    example = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    names.update(
        model=GPT(config), example=example, batches=[[example], [example]],
        steps=[[example] * 4] * 2, held_out=[example],
    )  # fmt: skip
    return names
