"""Graphs for people and programs: outlines, tables, plain data, pictures, differences."""
