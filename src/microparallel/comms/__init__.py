"""Talk: every communication primitive, over any transport."""
