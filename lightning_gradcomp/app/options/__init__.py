"""The options of a run, a dataclass a group: types and limits. The values are in conf/ and recipes/. No torch here."""
