"""Performers of attempts. Each provider makes one call for one attempt, and never retries by itself."""
