"""Images by name, and how the ranks share them."""
