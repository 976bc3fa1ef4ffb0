"""Text to batches: corpus, held-out split, tokenizer, token file, and a resumable sample order.

books = corpus.read_corpus("books/*.txt")        # or None: the demonstration corpus
tokenizer, found = tokens.prepare(books, files.default_cache())
order = sampler.SamplerConfig(context_tokens=256, sequences=8)
batch = sampler.Sampler(found.train, order, peer_key="a").batch(position)    # inputs, labels
"""
