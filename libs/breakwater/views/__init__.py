"""Columns, labels and sort orders of the read models, shared by the command line and the console."""
