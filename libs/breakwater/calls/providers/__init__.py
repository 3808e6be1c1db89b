"""Providers make attempts. Each makes one call for one attempt, and never retries by itself."""
