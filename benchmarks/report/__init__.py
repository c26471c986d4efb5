"""A report is a list of sections; one writer per format prints any list."""
