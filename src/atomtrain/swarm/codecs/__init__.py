"""How numbers travel: whole, in 16, 8 or 4 bits, or only the largest.

Begin with `codec.py`, the table of all; `slices.py` cuts a fragment.
"""
