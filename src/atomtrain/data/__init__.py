"""Text to batches: corpus, held-out split, tokenizer, token file, and a resumable sample order.

corpus = read_corpus("books/*.txt")            # or None: the demonstration corpus
tokenizer, tokens = prepare(corpus, default_cache())
sampler = Sampler(tokens.train, SamplerConfig(context_tokens=256, sequences=8), peer_key="a")
batch = sampler.batch(position)           # batch.inputs, batch.labels
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atomtrain.lazy import getter

if TYPE_CHECKING:
    from atomtrain.data.corpus import Corpus, Document, read_corpus
    from atomtrain.data.sampler import Batch, Sampler, SamplerConfig, held_out_batches
    from atomtrain.data.tokenizer import SEPARATOR, Tokenizer, read_tokenizer
    from atomtrain.data.tokens import Prepared, Tokens, bits_per_byte, open_tokens, prepare
    from atomtrain.files import default_cache

__all__ = [
    "SEPARATOR",
    "Batch",
    "Corpus",
    "Document",
    "Prepared",
    "Sampler",
    "SamplerConfig",
    "Tokenizer",
    "Tokens",
    "bits_per_byte",
    "default_cache",
    "held_out_batches",
    "open_tokens",
    "prepare",
    "read_corpus",
    "read_tokenizer",
]

__getattr__ = getter(
    "atomtrain.data",
    {
        "Corpus": "atomtrain.data.corpus",
        "Document": "atomtrain.data.corpus",
        "read_corpus": "atomtrain.data.corpus",
        "Prepared": "atomtrain.data.tokens",
        "default_cache": "atomtrain.files",
        "prepare": "atomtrain.data.tokens",
        "Batch": "atomtrain.data.sampler",
        "Sampler": "atomtrain.data.sampler",
        "SamplerConfig": "atomtrain.data.sampler",
        "held_out_batches": "atomtrain.data.sampler",
        "SEPARATOR": "atomtrain.data.tokenizer",
        "Tokenizer": "atomtrain.data.tokenizer",
        "read_tokenizer": "atomtrain.data.tokenizer",
        "Tokens": "atomtrain.data.tokens",
        "bits_per_byte": "atomtrain.data.tokens",
        "open_tokens": "atomtrain.data.tokens",
    },
)
