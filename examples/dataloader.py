"""A loop of your own with a DataLoader, changed as for accelerate: `python examples/dataloader.py`.

The lines that change are marked: the engine takes the place of model, optimizer and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atomtrain


def loss_of(output: Tensor, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(256, 256), nn.Tanh())],
                          nn.Linear(256, 4))  # fmt: skip
    rows = torch.randn(512, 256)
    classes = rows[:, :4].argmax(1)
    loader = DataLoader(TensorDataset(rows, classes), batch_size=64, shuffle=True, drop_last=True)

    engine = atomtrain.swap(  # was: model.to("cuda"); optimizer = AdamW(model.parameters())
        model,
        next(iter(loader)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=loss_of,
        device="emulated:4GiB/s",  # leave both out on a machine with a GPU
        device_memory="3MiB",
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=24)
    for epoch in range(3):
        for batch in loader:
            loss = engine.step([batch])  # was: loss = ...; loss.backward(); optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: loss {loss:.3f}")
    engine.close()
    right = (model(rows).argmax(1) == classes).float().mean()
    print(f"right on the training data: {right:.2f}")


if __name__ == "__main__":
    main()
