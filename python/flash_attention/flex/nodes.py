"""What a score_mod and a mask_mod do, as nodes. The text that the library takes is printed from them, once."""

from collections import namedtuple

# `name = operation arguments`. Arguments are names and literals. place: the user's line, "" if the node is ours.
Node = namedtuple("Node", "name operation arguments place", defaults=("",))


class Nodes:
    """The nodes of a whole program; they do not change. Declarations are first, then operations in order. results:
    {"score": its name, "visible": its name}, of which one may be missing. docs/numerics.md, "Programs", has the text."""

    __slots__ = ("nodes", "results", "text")

    def __init__(self, nodes, results):
        self.nodes, self.results = tuple(nodes), results
        lines = [f"{node.name} = {' '.join((node.operation, *node.arguments))}" for node in self.nodes]
        self.text = "\n".join([*lines, *(f"{name} = {of}" for name, of in results.items())])

    def by_name(self):
        return {node.name: node for node in self.nodes}

    def operands(self, name, operation):
        """The arguments of the node of that name if it is that operation, else ()."""
        for node in self.nodes:
            if node.name == name and node.operation == operation:
                return node.arguments
        return ()

    def place_of_line(self, line):
        """The place of the user's line that became this line of the text; lines count from 1."""
        return self.nodes[line - 1].place if line <= len(self.nodes) else "?"

    def replaced(self, others):
        """The same with other nodes: {name: those that stand in its place}."""
        nodes = []
        for node in self.nodes:
            nodes += others.get(node.name, (node,))
        return Nodes(nodes, self.results)
