"""Streams, arrays and graphs of other libraries, one file or package each, imported when used."""
