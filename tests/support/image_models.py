"""A tiny random LLaVA with its processor in a folder, and chats about pictures in one colour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>\n{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% if m['role'] == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
SIDE, PATCH = 16, 4
FEATURES = (SIDE // PATCH) ** 2
"""Of a picture, and so many tokens stand for it."""
COLOURS = {"red": (200, 10, 10), "green": (10, 200, 10), "blue": (10, 10, 200)}
_KEYS = ("path", "image", "url")


def write_llava(folder: Path, *, layers: int = 3, patch: int = PATCH) -> Any:
    """Write a random model with its processor, as `save_pretrained` does; return the model."""
    import transformers as hf

    torch.manual_seed(0)
    tokens = byte_tokenizer({"image_token": "<image>"})
    pictures = hf.CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    processor = hf.LlavaProcessor(
        image_processor=pictures, tokenizer=tokens, patch_size=patch,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip
    tower = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        image_size=SIDE, patch_size=patch,
    )  # fmt: skip
    language = hf.LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=tokens.pad_token_id, bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
    )  # fmt: skip
    config = hf.LlavaConfig(
        vision_config=tower, text_config=language,
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    model: Any = hf.LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model.eval()


def byte_tokenizer(extra: dict[str, str], special: tuple[str, ...] = ()) -> Any:
    """Return a tokenizer of bytes.

    Args:
        extra: Special tokens that have a name.
        special: Others.
    """
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens=extra,
    )  # fmt: skip


def row_about(
    *names: str, answer: str = "red", key: str = "path", question: str = "what colour?"
) -> dict[str, Any]:
    """Return a chat about pictures."""
    images = [{"type": "image", key: name} for name in names]
    asked = [*images, {"type": "text", "text": question}]
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def write_chats(folder: Path, count: int = 12, question: str = "what colour?") -> Path:
    """Write pictures of different sizes and a file of chats about them; return the file."""
    from PIL import Image

    (folder / "pictures").mkdir(parents=True)
    rows = []
    for index in range(count):
        colour = list(COLOURS)[index % 3]
        name = f"pictures/{index}.png"
        Image.new("RGB", (20 + index, 30), COLOURS[colour]).save(folder / name)
        rows.append(row_about(name, answer=colour, key=_KEYS[index % 3], question=question))
    return write_rows(folder / "chats.jsonl", rows)
