"""Pipelines and swarms, event by event and round by round, on links that are not there."""
