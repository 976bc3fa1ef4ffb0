"""Pages of `docs/` and reports that are made from code or results."""
