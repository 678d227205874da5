"""Start ranks, join them, and turn one rank's failure into everybody's error."""
