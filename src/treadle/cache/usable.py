"""How far what was found in the tree serves a sequence. Engine thread only; nothing here changes anything."""

from __future__ import annotations

from treadle.cache.columns import SoloColumns
from treadle.cache.layers import Layers
from treadle.cache.node import Match, Node, deepest_checkpoint
from treadle.cache.segments import Holder, Live
from treadle.cache.transfer import Snapshot, needs_snapshots

DEEPER = 8  # nodes below a match that are searched for a snapshot which reaches back to it


def readable(match: Match) -> int:
    """The match up to the first node whose rows are lost."""
    for node in match.nodes:
        if isinstance(node.payload, Live) and node.payload.holder.lost:
            return node.start
    return match.length


def usable(match: Match, most: int, layers: Layers) -> tuple[int, Snapshot | None]:
    """How far the match serves: all of it, or up to a snapshot where recurrent or windowed layers need one."""
    if most <= 0 or not needs_snapshots(layers):
        return max(most, 0), None
    for node in _downwards(match.nodes[-1]) if match.nodes else ():
        for checkpoint in node.checkpoints:
            held = checkpoint.value
            assert isinstance(held, Snapshot)
            if held.floor <= most <= held.position:
                return most, held
    below = deepest_checkpoint(match, most)
    if below is None:
        return 0, None
    assert isinstance(below.value, Snapshot)
    return below.position, below.value


def parked(match: Match, most: int) -> Holder | None:
    """The parked holder of the deepest used rows, if moving it costs less than copying from it."""
    node = next((n for n in reversed(match.nodes) if n.start < most), None)
    if node is None or not isinstance(node.payload, Live) or not node.payload.holder.parked:
        return None
    holder = node.payload.holder
    return holder if holder.known <= 2 * most and holder.nodes()[0].start == 0 else None


def reach(holder: Holder, most: int) -> int:
    """How many of the first `most` tokens a parked holder's layers can go back to; 0 if they cannot."""
    layers, _ = holder.locate()
    length = min(most, holder.known)
    back = holder.known - length
    if back == 0:
        return length
    if layers.states:
        return 0
    reaches = all(isinstance(columns, SoloColumns) and columns.reaches(length) for columns in layers.columns.values())
    return length if reaches else 0


def pieces(match: Match, length: int) -> list[tuple[Node, int]]:
    return [(n, min(used, length - n.start)) for n, used in match.pieces() if n.start < length]


def _downwards(node: Node) -> list[Node]:
    """A node and the most recently used line of nodes below it."""
    line = [node]
    while node.children and len(line) < DEEPER:
        node = max(node.children.values(), key=lambda child: child.last_used)
        line.append(node)
    return line
