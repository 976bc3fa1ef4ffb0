"""Every family of causal language models of transformers: small, random, trained, and compared."""
