"""Fine-tunes a Hugging Face model with `Trainer`: `python examples/trainer.py`.

Who comes from `transformers.Trainer` changes the import and names a device budget; its
`TrainingArguments` may stay. The model is small and random, so that the example runs anywhere.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import atomtrain  # instead of: from transformers import Trainer, TrainingArguments

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
CONTEXT = 64


class Text:
    """Windows of this file, byte by byte."""

    def __init__(self) -> None:
        with open(__file__, "rb") as file:
            self.bytes = torch.tensor(list(file.read()))

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.bytes[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


class Watcher(atomtrain.Callback):
    def on_step_end(self, trainer: atomtrain.Trainer, course: object, loss: float) -> None:
        if trainer.course.step % 5 == 0:
            print(f"step {trainer.course.step}: loss {loss:.3f}")


def main() -> None:
    torch.manual_seed(0)
    trainer = atomtrain.Trainer(
        model=LlamaForCausalLM(CONFIG),
        args=atomtrain.TrainerArguments(
            output_dir="trained", micro_batch=4, micro_batches=2, epochs=2, learning_rate=3e-3
        ),
        train_dataset=Text(),
        callbacks=[Watcher()],
        device="emulated:4GiB/s",  # leave both out on a machine with a GPU
        device_memory="10MiB",
    )
    with trainer:
        print(trainer.plan)
        history = trainer.train()
        print(history)
        trainer.save_model("trained/model")


if __name__ == "__main__":
    main()
