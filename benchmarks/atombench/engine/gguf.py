"""`atom bench gguf`: does llama.cpp compute what was trained?

SmolLM2-135M takes a step by the real command and is exported for transformers and as GGUF files.
llama.cpp, by `llama-cpp-python`, and transformers get one prompt. Of each file:

- `same_tokens`: llama.cpp cuts the prompt into the same ones;
- `same_text`: both write the same, of the likeliest tokens each;
- `mean_kl_nats`: divergence of llama.cpp's probabilities from those of transformers, a position;
- `same_top_share`: positions at which the likeliest token is the same.

With `--quick` a tiny random model takes its place, which shows that all of it works.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.finetune import atom, smollm_folder, tiny_folder
from atomtrain.errors import ConfigError

_PACKAGE, _MODULE = "llama-cpp-python", "llama_cpp"
_PROMPT = "In the beginning God created the heaven and the earth. And the earth was"
_TOKENS = 24
_KINDS = ("f16", "q8_0")
_MEMORY, _QUICK_MEMORY = "640MiB", "6MiB"


def run(options: BenchmarkOptions) -> Result:
    """Measure; see the module.

    Raises:
        ConfigError: llama.cpp is missing, or a command fails.
    """
    if importlib.util.find_spec(_MODULE) is None:
        raise ConfigError(f"llama.cpp is missing: pip install {_PACKAGE}")
    with tempfile.TemporaryDirectory(prefix="atom-gguf-") as temporary:
        base = Path(temporary)
        folder = tiny_folder(base / "tiny") if options.quick else smollm_folder()
        progress(f"a step of {folder.name}")
        atom(
            "train", "--model", str(folder), "--directory", str(base), "--run", "run",
            "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--no-profile", "--plain",
            "--device-memory", _QUICK_MEMORY if options.quick else _MEMORY, "--context", "64",
            "--sequences", "2", "--steps", "1", "--precision", "fp32",
        )  # fmt: skip
        peer, whole = str(base / "run" / "peer-0"), base / "exported"
        atom("export", peer, str(whole))
        expected, found = _of_transformers(whole), {}
        for kind in _KINDS:
            file = base / f"{kind}.gguf"
            atom("export", peer, str(file), "--gguf", kind)
            found[kind] = _compared(file, *expected)
            progress(f"{kind}: KL {found[kind]['mean_kl_nats']:.2g}")
    result = description()
    for name in (_PACKAGE, "transformers"):
        result["versions"][name] = importlib.metadata.version(name)
    inputs = {"model": folder.name, "prompt": _PROMPT, "tokens": _TOKENS}
    return {**result, "inputs": inputs, "prompt_tokens": len(expected[0]), **found}


def _of_transformers(folder: Path) -> tuple[list[int], torch.Tensor, str]:
    """Return the prompt's tokens, the logits after each `[T, V]` float32, and what is written."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load: Any = AutoModelForCausalLM.from_pretrained
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = load(folder, dtype=torch.float32).eval()
    ids = tokenizer(_PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0]
    written = model.generate(ids, max_new_tokens=_TOKENS, do_sample=False)[0, ids.shape[1] :]
    return ids[0].tolist(), logits, tokenizer.decode(written, skip_special_tokens=True)


def _compared(file: Path, ids: list[int], logits: torch.Tensor, text: str) -> dict[str, Any]:
    llama: Any = importlib.import_module(_MODULE)
    model = llama.Llama(str(file), n_ctx=128, logits_all=True, verbose=False)
    cut = model.tokenize(_PROMPT.encode(), add_bos=False, special=True)
    model.eval(ids)
    scores = torch.tensor(model.scores[: len(ids)])
    theirs, ours = (each.double().log_softmax(-1) for each in (scores, logits))
    model.reset()
    done = model.create_completion(ids, max_tokens=_TOKENS, temperature=0)
    model.close()
    return {
        "same_tokens": cut == ids,
        "same_text": done["choices"][0]["text"] == text,
        "mean_kl_nats": float((ours.exp() * (ours - theirs)).sum(-1).mean()),
        "same_top_share": float((theirs.argmax(-1) == ours.argmax(-1)).float().mean()),
    }
