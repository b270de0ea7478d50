"""The options of a run, a dataclass for each group: types and limits. The values are in conf/ and recipes/."""
