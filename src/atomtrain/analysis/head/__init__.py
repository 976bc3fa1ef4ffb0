"""The head of a language model, and its loss in pieces of the vocabulary.

Stands on `layers` and `costs`. Begin with `head.py`.
"""
