"""Published weights in few bits, made wide while they are read.

Begin with `files.py`. The other modules have one way each in which such weights are published. Stands on `models`.
"""
