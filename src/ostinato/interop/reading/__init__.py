"""The parts of `graphed` that all libraries share: keys, guards, padding, graphs.  Imports none."""
