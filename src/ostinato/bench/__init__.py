"""The benchmarks of `ostinato bench`: our ways of decoding, and a profile of one step.

    shapes          model shapes by name, with random weights (`random_weights`)
    floor           bytes a token must read, over the bandwidth that this machine shows
    ways            what decodes in a comparison: its interface, and our ways
    options         the options of a comparison, and the points at which it measures
    decode          measures all of them in turns, point by point, prompts too
    profile         measures the graph of one step, launch by launch
    report, plot    tables, result files, pictures

Every number is the median of several rounds in which all contestants take turns.  A result names
what could not be measured, and why.  Other libraries beside ours: `benchmarks/decode.py`.
"""
