"""Parts of a graph as models, and the search for the smallest one that is refused, by judges written here."""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import ModelProto, TensorProto, helper

from trt_engine.graph import walk
from trt_engine.graph.reduce import Reduction, contiguous_ranges, extract_subgraph, guess_output
from trt_engine.graph.shape_inference import TensorInfo, trace

from .models import graph, ints, model, node, value, weight

HALF = TensorProto.FLOAT16


def chain(length: int, at: dict[int, str] | None = None) -> ModelProto:
    """Relu after Relu, other operators at some places."""
    names = ["x", *(f"t{index}" for index in range(length - 1)), "y"]
    nodes = [node((at or {}).get(i, "Relu"), [names[i]], [names[i + 1]], name=f"n{i}") for i in range(length)]
    return model(nodes, [value("x", ["batch", 3, 4, 4])], [value("y", None)])


def has(*operators: str) -> Callable[[ModelProto], bool]:
    return lambda part: set(operators) <= {item.op_type for item in walk.all_nodes(part)}


def facts_of(proto: ModelProto) -> dict[str, TensorInfo]:
    return trace(proto, {}).tensors


# ------------------------------------------------------------------------------------------------ parts


def test_what_a_part_reads_is_an_input_and_what_none_of_it_reads_an_output() -> None:
    proto = model(
        [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["r"]), node("Add", ["r", "c"], ["y"])],
        [value("x", ["batch", 3, 8, 8])],
        [value("y", None)],
        [weight("w", 4, 3, 3, 3), weight("unread", 9)],
    )
    part = extract_subgraph(proto, [1], facts_of(proto))
    assert part is not None
    assert [item.name for item in part.graph.input] == ["c"]
    assert [dim.dim_value for dim in part.graph.input[0].type.tensor_type.shape.dim] == [0, 4, 6, 6]
    assert [item.name for item in part.graph.output] == ["r"] and not part.graph.initializer
    first = extract_subgraph(proto, [0, 2], facts_of(proto))
    assert first is not None
    assert [item.name for item in first.graph.input] == ["x", "r"]
    assert [item.name for item in first.graph.initializer] == ["w"]
    assert [item.name for item in first.graph.output] == ["y"]
    onnx.checker.check_model(part)
    onnx.checker.check_model(first)


def test_what_depends_on_constants_alone_stays_a_constant() -> None:
    proto = model(
        [node("Concat", ["a", "b"], ["shape"], axis=0), node("Reshape", ["x", "shape"], ["y"])],
        [value("x", ["batch", 4])],
        [value("y", None)],
        [ints("a", -1), ints("b", 2)],
    )
    part = extract_subgraph(proto, [1], facts_of(proto))
    assert part is not None
    assert [item.name for item in part.graph.input] == ["x"]
    assert onnx.numpy_helper.to_array(part.graph.initializer[0]).tolist() == [-1, 2]


def test_given_sizes_take_the_place_of_open_ones() -> None:
    proto = chain(2)
    part = extract_subgraph(proto, [0, 1], trace(proto, {"x": (2, 3, 4, 4)}).tensors, shapes={"x": (2, 3, 4, 4)})
    assert part is not None
    assert [dim.dim_value for dim in part.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 4, 4]


def test_a_part_whose_inputs_have_no_known_rank_is_not_made() -> None:
    proto = model(
        [node("Odd", ["x"], ["a"], domain="mine"), node("Relu", ["a"], ["y"])],
        [value("x", [1])], [value("y", None)], domains={"mine": 1},
    )  # fmt: skip
    assert extract_subgraph(proto, [1], facts_of(proto)) is None
    assert extract_subgraph(proto, [0, 1], facts_of(proto)) is not None


def branching() -> ModelProto:
    """An If whose branch has a Bernoulli between two others, in a chain."""
    inner = [
        node("Relu", ["x"], ["i0"], name="i0"),
        node("Bernoulli", ["i0"], ["i1"], name="i1"),
        node("Abs", ["i1"], ["i2"], name="i2"),
    ]
    other = graph([node("Relu", ["x"], ["o"], name="o0")], [], [value("o", None)])
    return model(
        [
            node("Relu", ["x"], ["a"], name="n0"),
            node("ReduceMax", ["a"], ["m"], name="n1", keepdims=0),
            node("Cast", ["m"], ["c"], name="n2", to=TensorProto.BOOL),
            node("If", ["c"], ["d"], name="n3", then_branch=graph(inner, [], [value("i2", None)]), else_branch=other),
            node("Relu", ["d"], ["y"], name="n4"),
        ],
        [value("x", [1, 3, 4, 4])],
        [value("y", None)],
    )


def test_what_a_body_takes_from_around_it_is_read_by_its_node() -> None:
    proto = branching()
    body = next(body for _, body in walk.bodies(proto.graph.node[3]))
    assert list(walk.outer_scope_names(body)) == ["x"]
    part = extract_subgraph(proto, [3], facts_of(proto))
    assert part is not None
    assert [item.name for item in part.graph.input] == ["c", "x"]


def test_unbroken_runs_come_longest_first() -> None:
    assert contiguous_ranges({0, 1, 4, 5, 6, 9}, 10) == [range(4, 7), range(2), range(9, 10)]
    assert contiguous_ranges(set(), 3) == []


def test_the_output_of_types_that_do_not_fit_is_their_broadcast() -> None:
    facts = {"a": TensorInfo(TensorProto.FLOAT, (-1, 3, 1)), "b": TensorInfo(HALF, (3, 8))}
    assert guess_output(node("Add", ["a", "b"], ["y"]), facts) == TensorInfo(TensorProto.FLOAT, (-1, 3, 8))
    assert guess_output(node("Add", ["a", "unknown"], ["y"]), facts) is None


# ------------------------------------------------------------------------------------------------ the search


def test_one_refused_node_deep_in_a_chain_is_found_alone() -> None:
    search = Reduction(chain(200, {137: "Bernoulli"}), has("Bernoulli"))
    best = search.run()
    assert best is not None and [item.name for item in best.graph.node] == ["n137"]
    assert (search.nodes, search.of, search.complete) == (1, 200, True)
    assert search.probes < 25
    onnx.checker.check_model(best)


def test_the_candidates_are_bounded_and_the_smallest_part_until_then_is_given() -> None:
    asked = []

    def refused(part: ModelProto) -> bool:
        asked.append(part)
        return has("Abs", "Neg")(part)

    search = Reduction(chain(60, {7: "Abs", 51: "Neg"}), refused, max_candidates=9)
    best = search.run()
    assert best is not None and has("Abs", "Neg")(best)
    assert len(asked) == search.probes == 9
    assert not search.complete and 2 < search.nodes < 60


def test_a_node_in_a_branch_is_found_alone() -> None:
    search = Reduction(branching(), has("Bernoulli"))
    best = search.run()
    assert best is not None and [item.name for item in best.graph.node] == ["i1"]
    assert search.of == 9
    onnx.checker.check_model(best)


def test_what_is_refused_inside_of_control_flow_alone_keeps_it_and_thins_the_body() -> None:
    search = Reduction(branching(), has("If", "Bernoulli"))
    best = search.run()
    assert best is not None
    names = {item.name for item in walk.all_nodes(best)}
    assert {"n3", "i1"} <= names and "i0" not in names
    assert search.nodes <= 4  # the If, the Bernoulli, and what each branch has to give


def test_a_loops_body_knows_the_types_of_what_it_carries() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["cond"], ["cond_out"], name="b0"),
            helper.make_node("Bernoulli", ["carried"], ["drawn"], name="b1"),
            helper.make_node("Add", ["drawn", "w"], ["next"], name="b2"),
        ],
        "body",
        [onnx.ValueInfoProto(name="i"), onnx.ValueInfoProto(name="cond"), onnx.ValueInfoProto(name="carried")],
        [onnx.ValueInfoProto(name="cond_out"), onnx.ValueInfoProto(name="next")],
    )
    proto = model(
        [node("Relu", ["x"], ["a"]), node("Loop", ["trips", "", "a"], ["y"], body=body)],
        [value("x", [2, 3])], [value("y", None)], [ints("trips", 4), weight("w", 3)],
    )  # fmt: skip
    search = Reduction(proto, has("Bernoulli"))
    best = search.run()
    assert best is not None and [item.name for item in best.graph.node] == ["b1"]
    given = best.graph.input[0].type.tensor_type
    assert (given.elem_type, [dim.dim_value for dim in given.shape.dim]) == (TensorProto.FLOAT, [2, 3])


def test_a_node_in_a_local_function_is_found_alone() -> None:
    inside = helper.make_function(
        "mine", "Block", ["p"], ["q"],
        [helper.make_node("Relu", ["p"], ["t"]), helper.make_node("Bernoulli", ["t"], ["q"])],
        [helper.make_opsetid("", 20)],
    )  # fmt: skip
    proto = model(
        [node("Relu", ["x"], ["a"]), node("Block", ["a"], ["y"], domain="mine")],
        [value("x", [2, 3])], [value("y", None)], domains={"mine": 1}, functions=[inside],
    )  # fmt: skip
    search = Reduction(proto, has("Bernoulli"))
    best = search.run()
    assert best is not None and [item.op_type for item in best.graph.node] == ["Bernoulli"]
    assert not best.functions and search.of == 4
