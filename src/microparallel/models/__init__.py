"""The subjects of the course: models small enough to read."""
