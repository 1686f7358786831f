"""The auditor of any callable, in no registry: what it takes, how it is judged, and its notebook's session."""
