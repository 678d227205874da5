"""Move bytes between ranks."""
