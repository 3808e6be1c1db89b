"""The read models as people see them: the columns, words and orders that the command line and the console share."""
