"""What a score_mod and a mask_mod do, as nodes. The text that the library takes is printed from them, once."""

from collections import namedtuple

# `name = operation arguments`. Arguments are names and literals; place: the user's line, "" if it is none of theirs.
Node = namedtuple("Node", "name operation arguments place", defaults=("",))


class Nodes:
    """Of a whole program, which stays as it is: declarations, then operations in order, then results, {"score": its name,
    "visible": its name}, either of which may be missing. docs/numerics.md, "Programs", has the text."""

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
        """Of the user's line of a line of the text, from 1."""
        return self.nodes[line - 1].place if line <= len(self.nodes) else "?"

    def replaced(self, others):
        """The same with other nodes: {name: those that stand in its place}."""
        nodes = []
        for node in self.nodes:
            nodes += others.get(node.name, (node,))
        return Nodes(nodes, self.results)
