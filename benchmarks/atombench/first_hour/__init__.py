"""The first ten minutes on a GPU that nobody has had yet: `scripts/first-hour`.

Parts follow one another, each in a process of its own and under its own time, and each leaves a
file. Begin at `hour`, then `parts`. Nothing is installed or fetched, and no more than torch and
numpy is needed: what needs other packages is left out by name.
"""
