"""Erasing what the plane stores of a person or of a tenant."""
