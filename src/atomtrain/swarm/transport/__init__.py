"""Encrypted streams between two peers, straight or through a relay, and the messages on them.

Knows nothing of rounds. Begin with `transport.py`, the interface, and `messages.py`.
"""
