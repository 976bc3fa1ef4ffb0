"""What is known of every segment of a chain: made once, and gone with the chain."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import torch
from torch import nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.cost import segments
from atomtrain.planning.cost.host import host_choices, without
from atomtrain.planning.cost.segments import segments_of, sending_all
from atomtrain.views.plans.subject import subject


def small() -> tuple[Chain, ChainCosts]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    example = (torch.randn(4, 8), torch.zeros(1))
    traced = chain_of(model, example, torch.sum)
    return traced.chain, layer_costs(traced.chain, traced.bind(example))


def test_segments_are_made_once_for_a_chain_and_its_costs() -> None:
    chain, costs = small()
    first = segments_of(chain, costs)
    assert segments_of(chain, costs) is first
    assert segments_of(chain, ChainCosts(*costs)) is not first


def test_the_view_in_which_all_is_sent_is_made_once_and_gone_with_the_chain() -> None:
    analysis = subject("tiny", 16).analyse(1)
    chain, costs = analysis.chain, analysis.costs
    sending = sending_all(chain, costs)
    assert sending_all(chain, costs) is sending
    assert sending.chain.layers == chain.layers
    assert not sending.costs.remakes
    assert segments_of(*sending).sent_bytes.sum() > segments_of(chain, costs).sent_bytes.sum()
    key = id(sending.chain)
    assert key in segments._KNOWN
    del analysis, chain, costs, sending
    gc.collect()
    assert key not in segments._KNOWN


def test_nothing_is_left_of_chains_that_are_gone() -> None:
    analysis = subject("tiny", 16).analyse(1)
    chain, costs = analysis.chain, analysis.costs
    count = max(host_choices(chain, costs))
    assert count
    rest = without(chain, costs, count)
    assert without(chain, costs, count) is rest
    segments_of(*rest)
    keys = {id(chain), id(rest.chain)}
    assert keys <= segments._KNOWN.keys()
    del analysis, chain, costs, rest
    gc.collect()
    assert not keys & segments._KNOWN.keys()


def test_tables_are_what_each_segment_says() -> None:
    chain, costs = small()
    of_all = segments_of(chain, costs)
    for start, stop in itertools.combinations(range(len(chain.layers) + 1), 2):
        here = of_all.of(start, stop)
        assert here == type(here)(*(int(table[start, stop]) for table in of_all.table))
        saved = of_all.saved.of(start, stop)
        assert saved.movable
        assert of_all.saved_table[start, stop] == saved.n_bytes
        assert of_all.sent_table[start, stop] == of_all.sent_bytes[start, stop] == saved.sent_bytes
        assert of_all.sent_storages[start, stop] == saved.sent
    lower = np.tril_indices(len(chain.layers) + 1)
    assert np.isinf(of_all.saved_table[lower]).all()
    assert np.isinf(of_all.sent_table[lower]).all()
