"""Python imports this before a program whose path leads here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import held_train

held_train.hold_as_told()
