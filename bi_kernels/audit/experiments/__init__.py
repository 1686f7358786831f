"""What one audit's notebook shows beyond the relations: one file an audit."""
