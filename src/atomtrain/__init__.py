"""ATOM: train language models far larger than your GPU's memory, alone or with other peers.

Importing this package is cheap: torch is imported when a name that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atomtrain.lazy import getter

__version__ = "0.1.0"

if TYPE_CHECKING:
    from atomtrain.engine.api import swap as swap
    from atomtrain.engine.engine import Engine as Engine
    from atomtrain.engine.options import Options as Options
    from atomtrain.training.trainer.callbacks import Callback as Callback
    from atomtrain.training.trainer.trainer import Trainer as Trainer
    from atomtrain.training.trainer.trainer_arguments import TrainerArguments as TrainerArguments

__all__ = [
    "Callback",
    "Engine",
    "Options",
    "Trainer",
    "TrainerArguments",
    "__version__",
    "swap",
]

__getattr__ = getter(
    __name__,
    {
        "swap": "atomtrain.engine.api",
        "Engine": "atomtrain.engine.engine",
        "Options": "atomtrain.engine.options",
        "Callback": "atomtrain.training.trainer.callbacks",
        "Trainer": "atomtrain.training.trainer.trainer",
        "TrainerArguments": "atomtrain.training.trainer.trainer_arguments",
    },
)
