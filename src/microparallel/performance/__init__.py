"""How well does it go? Measurements and their reading."""
