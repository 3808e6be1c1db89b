"""Redis: one atomic script for each decision, and the typed calls to them. Every script reads Redis' own clock."""
