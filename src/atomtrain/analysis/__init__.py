"""Model -> chain of layers with costs. Nothing is allocated: analysis runs on fake tensors."""

from atomtrain.analysis.costs.costs import LayerCost, layer_costs
from atomtrain.analysis.costs.profile import LayerTime, layer_times
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.analysis.layers.trace import chain_of

__all__ = ["Chain", "Layer", "LayerCost", "LayerTime", "chain_of", "layer_costs", "layer_times"]
