"""Model -> chain of layers with costs. Nothing is allocated: analysis runs on fake tensors."""

from atomtrain.analysis.chain import Chain, Layer
from atomtrain.analysis.costs import LayerCost, layer_costs
from atomtrain.analysis.profile import LayerTime, layer_times
from atomtrain.analysis.trace import chain_of

__all__ = ["Chain", "Layer", "LayerCost", "LayerTime", "chain_of", "layer_costs", "layer_times"]
