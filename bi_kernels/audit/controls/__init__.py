"""Controls: candidates broken on purpose, each of which an audit must flag."""
