"""Whether a group is gathered, and who sees it: one state, which the verbs of a `ParamGroup` move up and down.

| verb      | from                  | to       | what is done                                                   |
|-----------|-----------------------|----------|----------------------------------------------------------------|
| gather    | SHARDED, PART         | GATHERED | a gather is launched                                           |
| show      | GATHERED              | SHOWN    | compute waits for it; the modules register the full parameters |
| expose    | SHOWN                 | EXPOSED  | what the user's code does with them is noticed                 |
| conceal   | EXPOSED               | SHOWN    | what it has written is kept                                    |
| hide      | SHOWN                 | GATHERED | the modules register the shards                                |
| keep part | GATHERED, SHOWN       | PART     | the same; a part was copied, the rest is freed                 |
| free      | PART, GATHERED, SHOWN | SHARDED  | the same; all is freed                                         |

What is no part of it: `ParamGroup.ready`, when what is gathered is there, says nothing while nothing is gathered.
`Gather.resident` and `needs_launch` say in whose memory it lies, from attach() on. `MappedGather` knows what this rank reads of
others' memory, for which these wait before they write; `is_paused` follows from that. `GroupSettings.user_has_unsharded` says
who ends it, the user; `Runtime.keeps_gathered`, that a graph needs all groups.
"""

from __future__ import annotations

from enum import Enum

from ...tensor.dtensor.group_registry import Group


class GatherState(Enum):
    """What there is of a group beside its shards: more of it, and for more code to see, from state to state."""

    SHARDED = 0  # nothing
    PART = 1  # a post-forward shard, from which the next gather is made
    GATHERED = 2  # all of it, there or under way; the modules see the shards
    SHOWN = 3  # the modules see it
    EXPOSED = 4  # the user's code can reach it

    def __init__(self, place: int) -> None:
        self.gathered, self.shown = place >= 2, place >= 3  # Cost: properties would take three times as long


class Verb(Enum):
    """What moves the state: to where, and from where."""

    GATHER = GatherState.GATHERED, GatherState.SHARDED, GatherState.PART
    SHOW = GatherState.SHOWN, GatherState.GATHERED
    EXPOSE = GatherState.EXPOSED, GatherState.SHOWN
    CONCEAL = GatherState.SHOWN, GatherState.EXPOSED
    HIDE = GatherState.GATHERED, GatherState.SHOWN
    KEEP_PART = GatherState.PART, GatherState.GATHERED, GatherState.SHOWN
    FREE = GatherState.SHARDED, GatherState.PART, GatherState.GATHERED, GatherState.SHOWN

    def __init__(self, to: GatherState, *origins: GatherState) -> None:
        self.to, self.origins = to, origins  # Cost: `value` is a property in Python

    def refused(self, state: GatherState, group: Group) -> RuntimeError:
        """The error for a group in another state than those from which it may move."""
        return RuntimeError(
            f"cannot {self.name.lower().replace('_', ' ')} '{group.name}' while it is {state.name} (rank {group.mesh.rank}): "
            f"expected {' or '.join(each.name for each in self.origins)}; after an exception that has cut a forward or a "
            "backward short, call reset_iter_state() on the root"
        )
