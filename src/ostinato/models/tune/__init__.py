"""The search for launch shapes."""
