"""Communication: plans between layouts, and carrying them out."""
