"""The known ways to get a silent wrong answer out of a graph, each with a test that finds it.

    file              what goes wrong without a word
    test_lifetimes    memory, a stream or an event is freed or given to others while a graph uses it
    test_closed       memory, a graph or a device that was closed is used once more
    test_changes      a change of an executable reaches too much, too little, or the wrong node
    test_nodes        an index names another node, a loop never ends, an error in a node is lost
    test_values       a number or an array arrives as another one, or a copy reinterprets it
    test_arguments    an argument has the wrong type, or is memory of another device
    test_steps        a step replays another step's graph, or its own at the size of another call
    test_checks       a check of a step passes although its graph differs from its function
    test_order        work runs before the work that it depends on
    test_captures     work of a function is not in its captured or recorded graph
    test_threads      work of another thread or stream gets in between
    test_events       a replay does not record an event, or does not wait for one

`common.py` has what several files use.  A test runs on both drivers where both can show the fault;
where another launch must not take the short way of a replay, with both of these (`launcher`).
Graphed torch functions have tests of their own, in
`tests/interop/test_graphed_torch_footguns.py`.
"""
