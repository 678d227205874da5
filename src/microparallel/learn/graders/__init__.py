"""One file for each exercise: what it looks at, and the words for what it finds."""
