"""One round: leader and members, contributions to owners, means back, and what becomes of anchors.

Stands on `membership` and all below it. Begin with `leader_state.py`, a plain state machine, and
`exchange.py`.

A peer may die at any moment. Who has died shows as a stream that is lost, or by a deadline
(`membership/deadlines.py`); what follows is decided in one place a stage:

| stage | who dies | what follows | where |
|---|---|---|---|
| proposal | the leader to be | the next is told | `Rounds._propose_to` (node/round_loop.py) |
| forming | a member | the group is made without it | `LeaderRound.on_lost` (leader_state.py) |
| forming | the leader | nothing has changed | `RoundMember.run` (round_member.py) |
| exchange | a contributor | means are made without it | `Exchange._lose` (exchange.py) |
| exchange | an owner | its slices stay as they were | `Exchange._lose`, `LeaderRound._decide` |
| decision | a member | what it holds does not count | `LeaderRound.on_lost` |
| decision | the leader | the round is in doubt | `RoundMember.in_doubt` |
| afterwards | nobody | the next anchor ends the doubt | `merge_of_fetched` (round_member.py) |

Who says nothing by a deadline counts as lost: `LeaderRound.on_tick`, and `OwnedSlice.reduce` for
contributions.
"""
