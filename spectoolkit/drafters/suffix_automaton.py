"""How often each token followed each substring of a growing sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

ROOT, NONE = 0, -1


@dataclass(slots=True)
class Node:
    """The substrings that end at the same places of the sequence: each is a suffix of the longest one.

    Attributes:
        length: of the longest.
        suffix: the node of the longest suffix that ends at further places; NONE for the root, the empty string.
        next: per token, the node of these strings with the token behind them.
        times: per token, how often it followed them.
        followed: the sum of `times`.
        likeliest: the token with the largest entry of `times`; of equals the one seen last.
    """

    length: int = 0
    suffix: int = ROOT
    next: dict[int, int] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    followed: int = 0
    likeliest: int = NONE


@dataclass
class SuffixAutomaton:
    """The suffix automaton of one sequence (Blumer et al., 1985), at most two nodes per token, with counts.

    A token takes constant amortised time, and one count for each node among the substrings that end before it and have
    at most `max_context` tokens: few in text, and never more than `max_context`.

    Attributes:
        max_context: counts are kept of what followed substrings of 1 to so many tokens.
        nodes: the root first.
        whole: the node of the whole sequence.
        recent: the node of its last `max_context` tokens.
    """

    max_context: int
    nodes: list[Node] = field(default_factory=lambda: [Node(suffix=NONE)])
    whole: int = ROOT
    recent: int = ROOT

    def append(self, token: int) -> None:
        """Make the sequence longer by `token`."""
        self._count(token)
        self._grow(token)
        at = self.nodes[self.recent].next[token]
        while self.nodes[self.nodes[at].suffix].length >= self.max_context:
            at = self.nodes[at].suffix
        self.recent = at

    def repeated_suffix(self, max_length: int) -> tuple[int, Node]:
        """The longest suffix that occurred before, of at most `max_length` <= `max_context` tokens: length and node."""
        node = self.nodes[self.recent]
        while node.suffix != NONE and (node.followed == 0 or self.nodes[node.suffix].length >= max_length):
            node = self.nodes[node.suffix]
        return min(node.length, max_length), node

    def _count(self, token: int) -> None:
        """`token` follows the suffixes."""
        at = self.recent
        while at != ROOT:
            node = self.nodes[at]
            node.followed += 1
            node.times[token] = node.times.get(token, 0) + 1
            if node.times[token] >= node.times.get(node.likeliest, 0):
                node.likeliest = token
            at = node.suffix

    def _grow(self, token: int) -> None:
        """A node for the longer sequence, and one more where strings of one node now end at different places."""
        nodes, at = self.nodes, self.whole
        self.whole = len(nodes)
        nodes.append(Node(length=nodes[at].length + 1))
        while at != NONE and token not in nodes[at].next:
            nodes[at].next[token] = self.whole
            at = nodes[at].suffix
        if at == NONE:
            return
        length, repeated = nodes[at].length + 1, nodes[at].next[token]
        if nodes[repeated].length > length:  # its strings of up to `length` tokens end here too, the longer ones do not
            long, repeated = repeated, len(nodes)
            nodes.append(replace(nodes[long], length=length, next={**nodes[long].next}, times={**nodes[long].times}))
            nodes[long].suffix = repeated
            while at != NONE and nodes[at].next.get(token) == long:
                nodes[at].next[token] = repeated
                at = nodes[at].suffix
        nodes[self.whole].suffix = repeated
