"""Files: written so that a crash leaves the old one or the new one; tensors in them, as a stream."""
