"""Plans and steps for people: models by name, tables, pictures, traces, the page of plans."""
