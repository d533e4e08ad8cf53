"""What `graphed` of each library shares: keys, guards, padding, replays.  Imports no library."""
