"""The benchmark `network` at its smallest: every method runs, and what it measures says nothing."""

from __future__ import annotations

from atombench.links.shaping import Link
from atombench.network.model import ModelSetup
from atombench.network.setup import NetworkSetup

SMALLEST = NetworkSetup(
    model=ModelSetup(layers=4, width=64, vocabulary=64, sequence_tokens=16, sequences_per_peer=32),
    spare_share=3.5,
    micro_batches=(4, 8),
    links=(Link(bits_per_s=1e8, round_trip_s=0.01, loss_share=0.001),),
    stand_ins=(),
    local_steps=4,
    trials=6,
    trial_s=0.1,
    window_s=0.5,
    settle_s=1.0,
    alone_s=0.5,
    turns=3,
    longest_window_s=3.0,
)
