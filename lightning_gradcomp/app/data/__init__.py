"""The data sets, and their distribution over the ranks."""
