"""The benchmarks of `ostinato bench`: our ways of decoding beside other libraries', and a profile.

    shapes          model shapes by name, with random weights (`random_weights`)
    floor           bytes a token must read, over the bandwidth that this machine shows
    contest         the interface of a contestant: `ways` are ours, `peers` other libraries
    options         the options of a comparison, and the points at which it measures
    decode          measures all contestants in turns, point by point; `prompts` does so for prompts
    profile         measures the graph of one step, launch by launch
    report, plot    tables, result files, pictures

Every number is the median of several rounds in which all contestants take turns.  A result names
what could not be measured, and why.
"""
