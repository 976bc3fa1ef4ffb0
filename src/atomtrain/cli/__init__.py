"""Thin modules of one command each, or of a few that belong together."""
