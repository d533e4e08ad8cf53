"""Other libraries' streams, arrays and graphs; one file a library, none imported before its use."""
