"""The same layers for another thread.

Running a layer puts tensors in the place of its module's parameters for a moment, so two threads
must not run the same module. A replica of a module shares parameters, buffers and everything else
that it refers to; only the tables in which these are looked up are its own.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from atomtrain.analysis.layers.chain import Chain

_TABLES = ("_parameters", "_buffers", "_modules")


def replica_of(chain: Chain) -> Chain:
    """Return a chain of the same layers that another thread may run at the same time."""
    known: dict[int, nn.Module] = {}
    layers = [
        dataclasses.replace(layer, module=_replica(layer.module, known)) for layer in chain.layers
    ]
    return dataclasses.replace(chain, layers=tuple(layers))


def refresh(replica: Chain, chain: Chain) -> None:
    """Take over what was changed in a chain's modules, such as their mode or a dropout's rate."""
    for target, source in zip(replica.layers, chain.layers, strict=True):
        pairs = zip(target.module.modules(), source.module.modules(), strict=True)
        for copy, module in pairs:
            for name, value in module.__dict__.items():
                if name not in _TABLES:
                    copy.__dict__[name] = value


def _replica(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    replica = known[id(module)] = module.__class__.__new__(module.__class__)
    replica.__dict__.update(module.__dict__)
    for name in _TABLES[:2]:
        replica.__dict__[name] = dict(module.__dict__[name])
    replica.__dict__["_modules"] = {
        name: None if child is None else _replica(child, known)
        for name, child in module._modules.items()
    }
    return replica
