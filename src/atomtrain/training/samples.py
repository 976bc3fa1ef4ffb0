"""A few sentences of the model at the end of a run."""

from __future__ import annotations

import time

import torch

from atomtrain.events import EventLog
from atomtrain.models.sampling import sample
from atomtrain.training.seeds import seed_of
from atomtrain.training.setup.setup import Session

_TOKENS = 60
_SAMPLE_S = 20.0
_SAMPLES = 3


def tell_samples(session: Session, events: EventLog) -> None:
    """Generate a few sentences with the model on the host; stops soon after twenty seconds."""
    session.engine.synchronize()
    session.model.eval()
    # Peers that end together have one and the same model: let each say something else.
    seed = seed_of(session.recipe.seed, session.name, "samples")
    generator = torch.Generator().manual_seed(seed)
    tokenizer = session.text.tokenizer
    prompt = torch.tensor(tokenizer.encode(session.options.prompt) or [tokenizer.separator])
    context = session.recipe.sizes.context or session.recipe.context
    deadline_s = time.monotonic() + _SAMPLE_S
    for _ in range(_SAMPLES):
        ids: list[int] = []
        for token in sample(session.model, prompt, 0.8, generator, context):
            if token == tokenizer.separator or len(ids) == _TOKENS:
                break
            ids.append(token)
            if time.monotonic() > deadline_s:
                break
        text = tokenizer.decode(ids)
        events.emit("sample", prompt=session.options.prompt, text=text)
        if time.monotonic() > deadline_s:
            break
    session.model.train()
