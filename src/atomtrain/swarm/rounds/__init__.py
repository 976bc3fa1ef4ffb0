"""One round: leader and members, contributions to owners, means back, and what becomes of anchors.

Stands on `membership` and all below it. Begin with `leader_state.py`, a plain state machine, and
`exchange.py`.
"""
