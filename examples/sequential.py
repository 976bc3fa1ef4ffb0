"""Train an ordinary nn.Sequential that is larger than its device, in an ordinary loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import atomtrain

WIDTH, LAYERS, ROWS = 512, 12, 64


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).pow(2).mean()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1))
    goal = torch.randn(WIDTH, 1) / WIDTH**0.5

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randn(ROWS, WIDTH)
        return rows, rows @ goal

    with atomtrain.swap(
        model,
        batch(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        device_memory="6MiB",
        device="emulated:4GiB/s",
        loss=loss,
        options=atomtrain.Options(micro_batches=4),
    ) as engine:
        print(engine.plan.describe())
        for step in range(50):
            value = engine.step([batch() for _ in range(4)])
            if step % 10 == 0:
                print(f"step {step:3d}  loss {value:.4f}")
        print(f"held-out loss {engine.evaluate([batch()]):.4f}")
        assert engine.last is not None
        print(
            f"model state {engine.state_bytes} bytes, device peak {engine.last.device_peak_bytes}"
        )


if __name__ == "__main__":
    main()
