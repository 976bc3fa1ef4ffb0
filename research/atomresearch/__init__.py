"""Research beside the product: simulations of swarms and pipelines, and `atom simulate`."""
