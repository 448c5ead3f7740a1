"""Proper edge colouring: the edges of a graph as few matchings."""

from collections.abc import Sequence

Edge = tuple[int, int]


def colour_edges(num_nodes: int, edges: Sequence[Edge]) -> list[list[Edge]]:
    """Split the edges of a simple graph into matchings; deterministic.

    With D the largest degree, D colours are tried first: an edge without a common free colour
    gets one by swapping two colours along a path. That always succeeds on a bipartite graph
    (Koenig) and often elsewhere. Where it does not, D + 1 colours suffice (Vizing).

    Args:
        num_nodes: nodes are 0 to `num_nodes - 1`.
        edges: each once, no self-loops. Their order picks among the colourings.

    Returns:
        The matchings, D or D + 1 of them.

    References:
        Misra, Gries, "A constructive proof of Vizing's theorem", Inf. Proc. Letters 41, 1992.
    """
    degree = [0] * num_nodes
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
    largest = max(degree, default=0)

    colouring = _Colouring(num_nodes, largest)
    if not all(colouring.add_by_path(u, v) for u, v in edges):
        colouring = _Colouring(num_nodes, largest + 1)
        for u, v in edges:
            colouring.add_by_fan(u, v)
    return colouring.matchings()


class _Colouring:
    """A proper colouring of some edges, with `at[node][colour]` the node at the other end."""

    def __init__(self, num_nodes: int, num_colours: int) -> None:
        self.at: list[dict[int, int]] = [{} for _ in range(num_nodes)]
        self.num_colours = num_colours

    def matchings(self) -> list[list[Edge]]:
        classes: list[list[Edge]] = [[] for _ in range(self.num_colours)]
        for u, ends in enumerate(self.at):
            for colour, v in ends.items():
                if u < v:
                    classes[colour].append((u, v))
        return [edges for edges in classes if edges]

    def add_by_path(self, u: int, v: int) -> bool:
        """Colour the edge, if a swap along one path makes room for it."""
        free_u, free_v = self._free(u), self._free(v)
        if common := [colour for colour in free_u if colour not in self.at[v]]:
            self._set(u, v, common[0])
            return True
        for a in free_u:
            for b in free_v:
                path = self._path(v, a, b)
                if path[-1][1] != u:
                    self._swap(path, a, b)
                    self._set(u, v, a)
                    return True
        return False

    def add_by_fan(self, u: int, v: int) -> None:
        """Colour the edge by Misra and Gries: needs one colour more than the largest degree."""
        fan, colours = self._fan(u, v)
        c, d = self._free(u)[0], self._free(fan[-1])[0]
        if d in self.at[u]:
            self._swap(self._path(u, d, c), d, c)
            # The swap may have recoloured an edge of the fan: only the part before is one still.
            colours = [None, *(self._colour(u, node) for node in fan[1:])]
        end = 0
        while d in self.at[fan[end]]:
            end += 1
            colour = colours[end]
            assert colour is not None
            assert colour not in self.at[fan[end - 1]]
        for node, colour in zip(fan[1 : end + 1], colours[1 : end + 1], strict=True):
            assert colour is not None
            self._unset(u, node, colour)
        for node, colour in zip(fan[:end], colours[1 : end + 1], strict=True):
            assert colour is not None
            self._set(u, node, colour)
        self._set(u, fan[end], d)

    def _fan(self, u: int, v: int) -> tuple[list[int], list[int | None]]:
        """A maximal fan of u from v: each edge's colour is free on the node before it."""
        fan: list[int] = [v]
        colours: list[int | None] = [None]
        left = dict(sorted(self.at[u].items()))
        while True:
            colour = next((c for c in left if c not in self.at[fan[-1]]), None)
            if colour is None:
                return fan, colours
            fan.append(left.pop(colour))
            colours.append(colour)

    def _path(self, start: int, first: int, second: int) -> list[tuple[int, int, int]]:
        """The path from `start` whose edges alternate between two colours, as (u, v, colour)."""
        path = []
        node, colour = start, first
        while colour in self.at[node]:
            following = self.at[node][colour]
            path.append((node, following, colour))
            node, colour = following, second if colour == first else first
        return path

    def _swap(self, path: list[tuple[int, int, int]], first: int, second: int) -> None:
        for u, v, colour in path:
            self._unset(u, v, colour)
        for u, v, colour in path:
            self._set(u, v, second if colour == first else first)

    def _free(self, node: int) -> list[int]:
        return [colour for colour in range(self.num_colours) if colour not in self.at[node]]

    def _colour(self, u: int, v: int) -> int:
        return next(colour for colour, end in self.at[u].items() if end == v)

    def _set(self, u: int, v: int, colour: int) -> None:
        assert colour not in self.at[u]
        assert colour not in self.at[v]
        self.at[u][colour] = v
        self.at[v][colour] = u

    def _unset(self, u: int, v: int, colour: int) -> None:
        del self.at[u][colour]
        del self.at[v][colour]
