"""Partitioning of random graphs: clusters are convex, form no cycle together, and no two of them could be merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ort_cuda_plugin.model.ir import DType, Graph, Node, Value
from ort_cuda_plugin.model.partition import partition


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[Graph, list[bool]]:
    """Draw a graph of up to 14 nodes and whether each is claimed. A node reads up to three earlier results.

    Some of its inputs are implicit inputs, as of a node with subgraphs.
    """
    nodes: list[Node] = []
    values: list[Value] = []
    for index in range(draw(st.integers(1, 14))):
        picked = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        sources = [values[i] for i in sorted(picked)]
        implicit = draw(st.integers(0, len(sources)))
        output = Value(f"v{index}", DType.FLOAT32, ())
        node = Node(
            f"n{index}",
            "Op",
            "",
            1,
            tuple(sources[implicit:]),
            (output,),
            index=index,
            implicit_inputs=tuple(sources[:implicit]),
        )
        nodes.append(node)
        values.append(output)
    return Graph("g", nodes, [], []), draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes)))


def contracted_is_acyclic(graph: Graph, clusters: list[list[Node]]) -> bool:
    group = {node: f"cluster {i}" for i, cluster in enumerate(clusters) for node in cluster}
    group |= {node: node.name for node in graph.nodes if node not in group}
    producers = graph.producers()
    edges: dict[str, set[str]] = {name: set() for name in group.values()}
    for node in graph.nodes:
        edges[group[node]] |= {group[producers[value]] for value in node.reads()} - {group[node]}
    while ready := [name for name, sources in edges.items() if not sources & edges.keys()]:
        for name in ready:
            del edges[name]
    return not edges


@given(random_graphs())
def test_every_claimed_node_is_in_exactly_one_cluster(case: tuple[Graph, list[bool]]) -> None:
    graph, claimed = case
    placed = sorted(node.index for cluster in partition(graph, claimed) for node in cluster)
    assert placed == [i for i, claim in enumerate(claimed) if claim]


@given(random_graphs())
def test_contracting_all_clusters_leaves_no_cycle(case: tuple[Graph, list[bool]]) -> None:
    graph, claimed = case
    assert contracted_is_acyclic(graph, partition(graph, claimed))


@given(random_graphs())
def test_no_two_clusters_could_be_merged(case: tuple[Graph, list[bool]]) -> None:
    graph, claimed = case
    clusters = partition(graph, claimed)
    for i, first in enumerate(clusters):
        for j in range(i):
            rest = [cluster for k, cluster in enumerate(clusters) if k not in (i, j)]
            assert not contracted_is_acyclic(graph, [*rest, first + clusters[j]])


@given(random_graphs())
def test_the_nodes_of_a_cluster_are_in_topological_order(case: tuple[Graph, list[bool]]) -> None:
    graph, claimed = case
    clusters = partition(graph, claimed)
    assert all([node.index for node in cluster] == sorted(node.index for node in cluster) for cluster in clusters)


def chain(*op_types: str) -> Graph:
    """Return a graph in which each node reads the result of the node before it."""
    nodes: list[Node] = []
    value = Value("input", DType.FLOAT32, ())
    for index, op_type in enumerate(op_types):
        output = Value(f"v{index}", DType.FLOAT32, ())
        nodes.append(Node(f"n{index}", op_type, "", 1, (value,), (output,), index=index))
        value = output
    return Graph("chain", nodes, [], [value])


def test_a_fully_claimed_graph_is_one_cluster() -> None:
    assert len(partition(chain(*["Relu"] * 200), [True] * 200)) == 1


def test_a_declined_node_in_the_middle_of_a_chain_splits_it() -> None:
    clusters = partition(chain("A", "B", "C", "D", "E"), [True, True, False, True, True])
    assert [[node.op_type for node in cluster] for cluster in clusters] == [["A", "B"], ["D", "E"]]


def test_what_reads_no_cluster_is_computed_where_it_is_read() -> None:
    graph = chain("A", "B", "C")
    alone = Node("alone", "Alone", "", 1, (), (Value("free", DType.FLOAT32, ()),), index=0)
    last = graph.nodes[2]
    last.inputs = (*last.inputs, alone.outputs[0])
    graph.nodes.insert(0, alone)
    clusters = partition(graph, [True, True, False, True])
    assert [[node.op_type for node in cluster] for cluster in clusters] == [["Alone", "C"], ["A"]]


def test_many_declined_nodes_cost_no_more_than_many_nodes() -> None:
    length = 4000
    clusters = partition(chain(*["Op"] * length), [index % 2 == 0 for index in range(length)])
    assert len(clusters) == length // 2


def test_clusters_that_are_convex_alone_do_not_form_a_cycle_together() -> None:
    def value(name: str) -> Value:
        return Value(name, DType.FLOAT32, ())

    a, b, c, d, x, y = map(value, "abcdxy")
    # a -> x -> d and b -> y -> c: {a, c} and {b, d} are each convex, but contracting both creates a cycle.
    nodes = [
        Node("a", "A", "", 1, (), (a,), index=0),
        Node("b", "B", "", 1, (), (b,), index=1),
        Node("x", "X", "", 1, (a,), (x,), index=2),
        Node("y", "Y", "", 1, (b,), (y,), index=3),
        Node("c", "C", "", 1, (y,), (c,), index=4),
        Node("d", "D", "", 1, (x,), (d,), index=5),
    ]
    graph = Graph("g", nodes, [], [c, d])
    clusters = partition(graph, [True, True, False, False, True, True])
    assert contracted_is_acyclic(graph, clusters)
    assert len(clusters) == 2
