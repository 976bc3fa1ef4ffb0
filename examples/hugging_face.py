"""Trains a Hugging Face model that does not fit its device: `python examples/hugging_face.py`.

Needs transformers: pip install 'atomtrain[hf]'. The model is small and random, so that the example
runs anywhere without downloads; `AutoModelForCausalLM.from_pretrained(...)` works just as well.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import atomtrain

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.train()  # models that were loaded are in evaluation mode
    tokens = torch.randint(CONFIG.vocab_size, (4, 128))
    batch = {"input_ids": tokens, "labels": tokens}
    with atomtrain.swap(
        model,
        batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        device="emulated:4GiB/s",
        device_memory="40MiB",
        options=atomtrain.Options(micro_batches=2, clip_norm=1.0),
    ) as engine:
        print(engine.plan.describe())
        for step in range(5):
            print(f"step {step}: loss {engine.step([batch, batch]):.3f}")
        print(f"in evaluation mode: {engine.evaluate([batch]):.3f}")
        model.save_pretrained("swapped-llama", state_dict=engine.state_dict())
    print("saved to swapped-llama")


if __name__ == "__main__":
    main()
