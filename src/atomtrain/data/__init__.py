"""Text to batches: corpus, held-out split, tokenizer, token file, and a resumable sample order.

corpus = read_corpus("books/*.txt")            # or None: the demonstration corpus
tokenizer, tokens = prepare(corpus, default_cache())
sampler = Sampler(tokens.train, SamplerConfig(context_tokens=256, sequences=8), peer_key="a")
batch = sampler.batch(position)           # batch.inputs, batch.labels
"""
